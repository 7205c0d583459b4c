"""`saguaro bench` over HTTP: servers of our own, started as processes, beside servers given by URL."""

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from saguaro.cli import main
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.cli.bench_served import notes
from saguaro.cli.commands import Serve
from saguaro.cli.own_server import OwnServer, flags_of
from saguaro.client.client import Client, Stream
from saguaro.errors import ConfigError, PeerError
from saguaro.measure.peer_url import parse_peer_url
from saguaro.measure.served import Reading, Run, ServedEntry, figures, spread
from saguaro.measure.served_table import served_table
from saguaro.model.tiny import write_tiny
from tests.cli.here import Here
from tests.client.scripted import Exchange, scripted
from tests.serve.http.driver import running, tiny_llm

MODELS = {"data": [{"id": "other"}]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("served"), "llama")


def test_ours_and_a_peer_side_by_side(target: Path, tmp_path: Path, here: Here) -> None:
    """The peer is another server of the same model, so its text is the same too."""
    out = tmp_path / "out.json"
    with running(tiny_llm(target, draft=None, method="ar")) as other:
        args = ["bench", "--model", str(target), "--methods", "ar,ngram", "--no-chat", "--num-prompts", "6"]
        args += ["--concurrency", "1", "4", "--max-tokens", "8", "--peer", f"openai={other.url},name=theirs"]
        done = here(*args, "--kv-memory", "2MiB", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical text: ar, ngram\n" in done.stdout
    assert done.stdout.count("theirs") == 2
    report = json.loads(out.read_text())
    assert [(row["entry"], row["concurrency"]) for row in report["results"]] == [
        (name, level) for level in (1, 4) for name in ("ar", "ngram", "theirs")
    ]
    first = report["results"][0]
    for row in report["results"]:
        assert (row["requests"], row["compared"], row["same_text"]) == (6, 6, 6)
        assert (row["tokens"], row["prompt_tokens"]) == (first["tokens"], first["prompt_tokens"])
        assert row["tokens_counted_by"] == "usage"
        assert row["tok_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"] <= row["ttft_ms"]["p99"]
        assert row["ttft_ms"]["p50"] <= row["request_ms"]["p50"]
        assert row["failure"] is None
    assert report["served"]["ngram"].startswith("saguaro serve --model ")
    assert "--method ngram" in report["served"]["ngram"]
    assert set(report["versions"]) == {"saguaro", "torch", "transformers", "python"}


def say(e: Exchange, *, counts: bool = True) -> None:
    """A short answer that depends on the prompt alone."""
    e.begin()
    e.piece(e.body["messages"][0]["content"][:3])
    e.piece("!", "length")
    if counts:
        e.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    e.event("[DONE]")


def bench(*args: str) -> int:
    """The command in this process, without servers of ours."""
    return main.run(main.parse(["bench", "--methods", "none", "--num-prompts", "4", *args]))


def test_peers_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two peers: one counts its tokens, the other does not."""
    acts = {"a": say, "b": lambda e: say(e, counts=False)}
    with scripted(acts, MODELS) as url:
        peers = [f"openai={url}/{name}/v1,name={name}" for name in acts]
        status = bench("--peer", peers[0], "--peer", peers[1], "--concurrency", "2", "--json", str(tmp_path / "o"))
    assert status == 0
    a, b = json.loads((tmp_path / "o").read_text())["results"]
    assert (a["tokens"], a["prompt_tokens"], a["tokens_counted_by"]) == (20, 36, "usage")
    assert (b["tokens"], b["prompt_tokens"], b["tokens_counted_by"]) == (8, None, "events")
    assert "note: b reports no usage; its tokens are events with text, a lower bound" in capsys.readouterr().out


def test_requests_state_every_parameter_and_the_same_seeds() -> None:
    asked: list[dict[str, Any]] = []

    def note(e: Exchange) -> None:
        asked.append(e.body)
        say(e)

    with scripted({"a": note}, MODELS) as url:
        assert bench("--peer", f"openai={url}/a/v1", "--temperature", "0.5", "--concurrency", "1", "2") == 0
    texts = Counter(body["messages"][0]["content"] for body in asked)
    warm, measured = texts.most_common(1)[0], [one for one in asked if texts[one["messages"][0]["content"]] == 2]
    assert warm[1] == 4, "once at the start, and as many as the concurrency before each level"
    assert len(measured) == 8
    assert {body["messages"][0]["content"]: body["seed"] for body in measured[:4]} == {
        body["messages"][0]["content"]: body["seed"] for body in measured[4:]
    }
    assert len({body["seed"] for body in measured}) == 4
    stated = {
        "model": "other",
        "temperature": 0.5,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 128,
    }
    assert all(body.items() >= stated.items() for body in measured)


def test_a_peer_that_fails_midway_is_dropped_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    lock, n_left = threading.Lock(), [4]

    def tires(e: Exchange) -> None:
        with lock:
            n_left[0] -= 1
        if n_left[0] < 0:
            e.reply(503, b'{"error": {"message": "out of memory"}}')
        else:
            say(e)

    with scripted({"a": say, "b": tires}, MODELS) as url:
        peers = [f"openai={url}/{name}/v1,name={name}" for name in "ab"]
        assert bench("--peer", peers[0], "--peer", peers[1], "--concurrency", "1", "2") == 1
    said = capsys.readouterr().out
    assert f"FAILED: b: {url}/b/v1/chat/completions answered 503: out of memory" in said
    assert "OUTPUT DIFFERS" not in said


def test_ctrl_c_ends_it_while_a_peer_is_silent() -> None:
    asked, is_over = threading.Event(), threading.Event()

    def is_silent(e: Exchange) -> None:
        if e.body["max_tokens"] > 8:
            asked.set()
            is_over.wait()
        say(e)

    with scripted({"a": is_silent}, MODELS) as url:
        args = ["bench", "--methods", "none", "--peer", f"openai={url}/a/v1", "--concurrency", "2"]
        with subprocess.Popen([sys.executable, "-m", "saguaro", *args], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert asked.wait(120)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert "Traceback" not in process.stderr.read()
        is_over.set()


def test_at_most_so_many_requests_at_a_time() -> None:
    """A barrier of three is passed by three at once, and would not be by two."""
    barrier, lock, now, most = threading.Barrier(3, timeout=60), threading.Lock(), [0], [0]

    def meets(e: Exchange) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if e.body["max_tokens"] > 8:
            barrier.wait()
        with lock:
            now[0] -= 1
        say(e)

    with scripted({"a": meets}, MODELS) as url:
        assert bench("--peer", f"openai={url}/a/v1", "--concurrency", "3", "--num-prompts", "6") == 0
    assert most[0] == 3


def test_text_of_ours_that_differs_is_an_error() -> None:
    ar, sd, peer = (known_entry(name, 1.0, text) for name, text in (("ar", "a"), ("sd", "b"), ("peer", "c")))
    ar.is_ours = sd.is_ours = True
    entries = [ar, sd, peer]
    found = list(notes(entries, [figures(entry, 1, ar) for entry in entries]))
    assert [is_bad for _, is_bad in found] == [True]
    assert "OUTPUT DIFFERS: sd is not ar in 1 texts" in found[0][0]
    entries = [ar, peer]
    assert list(notes(entries, [figures(entry, 1, ar) for entry in entries])) == [("identical text: ar", False)]


def test_other_prompts_are_said() -> None:
    ours, theirs = known_entry("ours", 1.0, "a"), known_entry("theirs", 1.0, "a")
    theirs.runs[1].readings[0] = replace(theirs.runs[1].readings[0], n_prompt=3)
    (found,) = notes([ours, theirs], [figures(entry, 1, ours) for entry in (ours, theirs)])
    assert found == ("note: the prompts have 3 tokens at theirs and 2 at ours: another template or tokenizer", False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--peer", "openai=localhost"], "write http://HOST:PORT/v1"),
        (
            ["--peer", "openai=http://a,modle=x"],
            "peer option 'modle=x' is not understood; write each of model, key-env",
        ),
        (["--peer", "openai=http://a,key-env=NO_SUCH_KEY"], "there is no such variable; export NO_SUCH_KEY=KEY"),
        (["--peer", "openai=http://a,timeout=soon"], "timeout is 'soon'; write a number of seconds"),
        (["--peer", "openai=http://a", "--peer", "transformers"], "'transformers', which is not measured over HTTP"),
        (
            ["--peer", "openai=http://a", "--peer", "openai=http://a"],
            "two entries are called 'a'; give one another name",
        ),
        (["--peer", "openai=http://a", "--batch", "2"], "batch is 2; over HTTP requests are batched by the servers"),
        (["--peer", "openai=http://a", "--min-tokens", "2"], "min_tokens is 2; over HTTP there are max_tokens"),
        (["--peer", "openai=http://a", "--concurrency", "0"], "concurrency is 0; it must be at least 1"),
        (["--concurrency", "21"], "concurrency is 21, and there are 20 prompts; raise --num-prompts"),
        (["--concurrency", "2", "--max-batch-rows", "1"], "concurrency is 2; at most max_batch_rows, 1"),
        (["--concurrency", "2", "--methods", "none"], "methods is none and there is no peer"),
        (["--concurrency", "2", "--methods", "sd", "--model", "x"], "method sd needs a draft model"),
    ],
)
def test_mistakes_are_explained_before_anything_is_started(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        main.run(main.parse(["bench", *args]))
    assert message in str(found.value)


def test_a_peer_that_is_not_there_is_an_error_before_ours_are_started() -> None:
    with pytest.raises(PeerError, match="cannot be reached: connection refused"):
        main.run(main.parse(["bench", "--peer", "openai=http://127.0.0.1:1/v1", "--model", "/no/such"]))


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", " secret ")
    asked = []

    def note(e: Exchange) -> None:
        asked.append(e.headers["Authorization"])
        say(e)

    with scripted({"a": note}, MODELS) as url:
        assert bench("--peer", f"openai={url}/a/v1,key-env=A_KEY,model=x", "--concurrency", "1") == 0
    assert set(asked) == {"Bearer secret"}


def test_our_server_ends_with_its_owner(target: Path) -> None:
    with OwnServer(["--model", str(target), "--kv-memory", "2MiB"]) as server:
        assert httpx.get(server.endpoint.url + "/models").status_code == 401, "it serves its owner alone"
        assert len(Client(server.endpoint).models()) == 1
        process = server._process
    assert process.returncode == 0


def test_our_server_that_does_not_start_says_why() -> None:
    with pytest.raises(PeerError, match=r"(?s)ended before it served; it said:\n.*'/no/such' is no folder"):
        OwnServer(["--model", "/no/such"])


def test_flags_give_the_settings_back() -> None:
    """Every setting of the engine, with a value that is not its default."""
    strings = {"draft": "drop:1", "method": "sd", "fan_out": "uniform", "prepare": "always", "fallback": "ngram"}
    strings |= {"verification": "rejection", "link": "process", "draft_device": "cpu", "device": "cuda:1"}
    strings |= {"dtype": "fp8", "kv_memory": "3MiB", "learnt_dir": "/x", "draft_key_file": "/k", "quantization": "fp8"}
    others: dict[str, Any] = {"nodes": 9, "width": 2, "draft_threads": 2, "gpu_memory_utilization": 0.5}
    others |= {"max_model_len": 99, "max_inter_token_ms": 7.5, "threads": 3}
    known = strings | others
    changed = {}
    for one in fields(EngineArgs):
        assert one.default is not MISSING
        changed[one.name] = known.get(one.name, one.default)
        if one.name not in known:
            changed[one.name] = not one.default if isinstance(one.default, bool) else one.default + 1
    engine, which = EngineArgs(**changed), ModelArgs(model="m", revision="r", cache_dir=Path("/c"), chat_template="t")
    found = main.parse(["serve", *flags_of(which, engine)])
    assert isinstance(found, Serve)
    assert {one.name: getattr(found.engine, one.name) for one in fields(EngineArgs)} == changed
    assert found.which == which


def known_entry(name: str, seconds: float, *texts: str) -> ServedEntry:
    """An entry that has given these answers, one after the other."""
    same: dict[str, Any] = {"gaps": (0.1, 0.3), "seconds": 1, "n_tokens": 5, "n_prompt": 2, "is_counted": True}
    found = ServedEntry(name, no_request, lambda: None, is_comparable=True, is_ours=False)
    readings = {at: Reading(text=text, ttft=0.01 * (at + 1), **same) for at, text in enumerate(texts)}
    found.runs[1] = Run(1, readings, seconds)
    return found


def no_request(number: int) -> Stream:
    """Nothing is asked."""
    raise AssertionError(number)


def test_figures_of_known_answers() -> None:
    ours, theirs = known_entry("ours", 2.0, "a", "b"), known_entry("theirs", 4.0, "a", "c", "d")
    row = figures(theirs, 1, ours)
    assert (row["tokens"], row["tok_s"], row["ratio"]) == (15, 3.75, 0.75)
    assert (row["compared"], row["same_text"]) == (2, 1)
    assert row["per_token_ms"] == {"mean": 100.0, "p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert row["ttft_ms"]["p50"] == 20
    assert figures(ours, 4, ours)["tok_s"] == 0, "not measured"
    assert spread([]) is None
    console = Console(width=80)
    with console.capture() as shown:
        console.print(served_table(1, [row, {**figures(ours, 4, ours), "failure": "gone"}]))
    assert "100/100/100" in shown.get()
    assert "…" not in shown.get()
    assert "ours FAILED" in shown.get()


def test_options_of_a_peer() -> None:
    found = parse_peer_url("openai=https://x.example/api/v1,name=other,timeout=5", {})
    assert (found.name, found.model, found.endpoint.timeout, found.endpoint.key) == ("other", None, 5.0, None)
