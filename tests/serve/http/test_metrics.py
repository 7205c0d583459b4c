"""/metrics tells what happened, by vLLM's names where it has them."""

import re
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from saguaro import LLM
from tests.serve.http.driver import LONG, running, tiny_llm

TEXT = "/v1/completions"


def test_figures_are_those_of_what_was_served(llm: LLM) -> None:
    with running(llm) as server:
        whole = server.complete([5] * 40, **LONG, n=2, return_speculation=True, seed=3)
        server.events(TEXT, {"prompt": [7] * 10, "max_tokens": 5, "ignore_eos": True})
        server.complete("the", max_tokens=9, stop_token_ids=list(range(288)), speculation=False)
        rounds = [one for choice in whole["choices"] for one in choice["speculation"]]
        n_before = {name: server.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens")}
        assert n_before["drafts"] >= sum(bool(one["drafted"]) for one in rounds) > 0
        assert n_before["draft_tokens"] >= sum(len(one["drafted"]) for one in rounds) > 0
        assert server.metric("vllm:prompt_tokens_total") == 40 + 10 + 3 - 2  # "the" is one token
        assert server.metric("vllm:generation_tokens_total") == 300 + 5 + 1
        assert server.metric("vllm:request_success_total", finished_reason="length") == 3
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 1
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        places = [
            server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(3)
        ]
        assert sum(places) == accepted > 0
        assert places == sorted(places, reverse=True)
        hits = sum(server.metric("saguaro:cache_hits_total", after=after) for after in ("primary", "backup"))
        misses = sum(server.metric("saguaro:cache_misses_total", after=after) for after in ("primary", "backup"))
        assert hits >= sum(one["source"] == "cache" for one in rounds) > 0
        assert misses > 0
        assert server.metric("saguaro:fallbacks_total", source="draft") > 0
        assert server.metric("saguaro:draft_exposed_seconds_total") > 0
        assert server.metric("saguaro:draft_restarts_total") == 0
        assert server.metric("vllm:time_to_first_token_seconds_count") == 4
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 4
        n_deltas = server.metric("vllm:inter_token_latency_seconds_count")
        assert n_deltas == server.metric("vllm:time_per_output_token_seconds_count")
        assert len(rounds) - 2 <= n_deltas <= len(rounds) - 2 + 4
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert server.metric(f"vllm:{gauge}") == 0


def test_nodes_of_trees_by_depth_and_rank(folder: Path) -> None:
    """Every count is that of the rounds that the answer told."""
    with running(tiny_llm(folder, method="sd", nodes=8, width=2)) as server:
        told = server.complete("the end", **LONG, return_speculation=True)["choices"][0]["speculation"]
        expected: Counter[tuple[str, str]] = Counter()
        for one in told:
            depths: list[int] = []
            for at, node in enumerate(one["drafted"]):
                parent = node.get("parent", at - 1)
                is_accepted = node.get("accepted", at < one["accepted"])
                depths.append(1 + (depths[parent] if parent >= 0 else 0))
                rank = 1 + sum(other.get("parent", n - 1) == parent for n, other in enumerate(one["drafted"][:at]))
                for label, value in (("depth", depths[-1]), ("rank", rank)):
                    expected[f"verified_by_{label}", str(value)] += 1
                    expected[f"accepted_by_{label}", str(value)] += is_accepted
        assert expected["verified_by_rank", "2"] > 0, "trees"
        assert expected["accepted_by_depth", "2"] > 0
        found = server.client.get("/metrics").text
        for (what, value), n in expected.items():
            assert server.metric(f"saguaro:nodes_{what}_total", **{what.rpartition("_")[2]: value}) == n
        exported = re.findall(r"^saguaro:nodes_(\w+)_total\{.*?(?:depth|rank)=\"(\w+)\"", found, re.MULTILINE)
        assert set(exported) == set(expected)
        n_nodes = server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert n_nodes == sum(n for (what, _), n in expected.items() if what == "verified_by_depth")
        assert server.metric("vllm:generation_tokens_total") == sum(len(one["tokens"]) for one in told)


def test_prometheus_can_read_it(llm: LLM) -> None:
    with running(llm) as server:
        server.complete("the")
        answer = server.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        names = {family.name for family in text_string_to_metric_families(answer.text)}
    wanted = {f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")}
    wanted |= {"vllm:time_to_first_token_seconds", "vllm:kv_cache_usage_perc", "saguaro:cache_hits"}
    assert wanted <= names
