"""A draft service of a cluster: a replica on one node speculates with the draft on the other."""

import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.model.tiny import write_tiny
from tests.cluster.driver import NAME, Nodes, Served, below, command_of, nodes, serving, until
from tests.link.target import is_running

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

ASKED: dict[str, Any] = {"model": NAME, "prompt": "the end", "temperature": 0, "max_tokens": 32, "ignore_eos": True}


def ask(served: Served) -> dict[str, Any]:
    answer = served.http.post("/v1/completions", json={**ASKED, "return_speculation": True})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def is_drafted(choice: dict[str, Any]) -> bool:
    return any(one["source"] in ("draft", "cache") for one in choice["speculation"])


def services(cluster: Nodes) -> list[int]:
    """The processes of draft services."""
    return [pid for pid in below(cluster.process.pid) if re.search(r"tethered\0draft\0", command_of(pid))]


def test_a_replica_uses_a_draft_service_and_outlives_it(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / NAME, "llama")
    with LLM(folder, device="cpu") as llm:
        (expected,) = llm.generate("the end", SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    flags = [str(folder), "--served-model-name", NAME, "--device", "cpu", "--threads", "1", "--kv-memory", "2MiB"]
    flags += ["--draft", "drop:1", "--draft-services", "1", "--method", "sd", "--fallback", "draft"]
    with nodes() as cluster, serving(tmp_path / "log", *flags, "--ray-address", cluster.address) as served:
        until(lambda: is_drafted(ask(served)))
        assert ask(served)["text"] == expected.outputs[0].text
        (lost,) = services(cluster)
        os.kill(lost, signal.SIGKILL)
        assert ask(served)["text"] == expected.outputs[0].text
        until(lambda: is_drafted(ask(served)))
        (found,) = services(cluster)
        assert found != lost
        cluster.look()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(240) == 0
        until(lambda: not is_running(found))
