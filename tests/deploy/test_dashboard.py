"""The Grafana dashboard and the Prometheus example: every metric that they name is exported by a running server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from saguaro.model.tiny import write_tiny
from tests.serve.http.driver import running, tiny_llm

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(?:vllm|saguaro|process)[:_][a-zA-Z0-9_:]+")
LABEL = re.compile(r"\bby \((\w+)\)|\{\{(\w+)\}\}|(\w+)=~")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every sample that a server exports after some work, by the sample's name."""
    folder = write_tiny(tmp_path_factory.mktemp("served"), "llama", num_hidden_layers=4)
    found: dict[str, set[str]] = {}
    with running(tiny_llm(folder)) as server:
        server.complete("the end", max_tokens=40, ignore_eos=True, n=2)
        for family in text_string_to_metric_families(server.client.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_is_exported(exported: dict[str, set[str]]) -> None:
    named = {name for text in expressions() for name in METRIC.findall(text)}
    assert len(named) > 15
    assert named <= exported.keys()


def test_every_label_is_there(exported: dict[str, set[str]]) -> None:
    scraped = {"instance"}  # Prometheus adds it
    for text in expressions():
        labels = set().union(*(exported[name] for name in METRIC.findall(text))) | scraped
        for found in LABEL.findall(text):
            assert set(found) - {""} <= labels, text


def test_what_the_docs_promise_is_on_it() -> None:
    titles = {panel["title"] for panel in dashboard()["panels"]}
    wanted = {"Tokens per second", "Tokens per round", "Acceptance by position", "Hit rate", "Time to first token"}
    wanted |= {"Inter-token latency", "Requests", "KV memory", "Draft busy and exposed"}
    wanted |= {"Acceptance by depth", "Acceptance by rank", "Nodes per token"}
    assert wanted <= titles


def test_panels_do_not_overlap_and_use_the_variable() -> None:
    found = dashboard()
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        sources = [panel, *panel["targets"]] if panel["type"] != "row" else []
        assert all(one["datasource"]["uid"] == "${datasource}" for one in sources)
    assert [one["name"] for one in found["templating"]["list"]] == ["datasource", "model", "instance"]


def test_queries_can_be_parsed() -> None:
    parser = pytest.importorskip("promql_parser")
    for text in expressions():
        parser.parse(text.replace("$__rate_interval", "5m"))


def test_the_prometheus_example_is_what_the_docs_show() -> None:
    text = (DEPLOY / "prometheus.yml").read_text()
    assert "job_name: saguaro" in text
    assert "metrics_path" not in text, "/metrics is the default"
    assert '"127.0.0.1:8000"' in text
