"""`saguaro bench` and `saguaro compare` on tiny models: the table, the JSON, and what happens if outputs differ."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from saguaro import LLM, EngineConfig, SamplingParams
from saguaro.cli import bench, compare, main
from saguaro.cli.candidates import method_names
from saguaro.device.affinity import usable_cores
from saguaro.errors import ConfigError
from saguaro.measure.candidate import Candidate, first_difference, results, table
from saguaro.measure.interleaved import Generate, generate_by, run_in_turn, seeded
from saguaro.measure.metrics import Summary
from saguaro.measure.peer import LlamaCpp, Peer, check_peer, gguf_of
from saguaro.measure.prompts import OURS, read_prompts
from saguaro.model.tiny import write_tiny
from saguaro.model.tokenizer import load_tokenizer

KEYS = {
    "method",
    "tok_s",
    "ratio_ar",
    "ratio_sd",
    "tokens_per_round",
    "acceptance",
    "nodes_per_token",
    "hit_rate",
    "hidden_share",
    "identical_to_ar",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags that name a tiny target and a tiny draft."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_tiny(folder / "target", "llama"), write_tiny(folder / "draft", "llama", seed=1)
    return ("--model", str(target), "--draft", str(draft), "--link", "inline", "--max-tokens", "6")


def test_bench_as_a_user_runs_it(pair: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("the end", "in an inn")))
    (tmp_path / "b.txt").write_text("another\n")
    out = tmp_path / "out.json"
    args = ["bench", *pair, "--methods", "sd,ssd,ngram", "--batch", "2", "--json", str(out)]
    args += ["--prepare", "always", "--peer", "transformers"]
    args += ["--prompts", str(tmp_path / "a.jsonl"), "--prompts", str(tmp_path / "b.txt"), "--num-prompts", "9"]
    done = subprocess.run([sys.executable, "-m", "saguaro", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hidden" in done.stdout
    assert "identical output: ar, sd, ssd, ngram" in done.stdout
    report = json.loads(out.read_text())
    by_name = {row["method"]: row for row in report["results"]}
    assert list(by_name) == ["ar", "sd", "ssd", "ngram", "transformers"]
    assert all(set(row) >= KEYS for row in report["results"])
    for name in ("ar", "sd", "ssd", "ngram"):
        row = by_name[name]
        assert row["identical_to_ar"] is True
        assert row["ratio_ar"] == pytest.approx(row["tok_s"] / by_name["ar"]["tok_s"])
        assert row["ratio_sd"] == pytest.approx(row["tok_s"] / by_name["sd"]["tok_s"])
        assert row["tokens"] == row["summary"]["tokens"] == by_name["ar"]["tokens"]
        assert row["tokens_per_round"] >= 1
        assert row["nodes_per_token"] == (row["summary"]["speculated"] / row["tokens"] or None)
    assert (by_name["ar"]["acceptance"], by_name["ar"]["hit_rate"]) == (None, None)
    assert by_name["sd"]["hit_rate"] is None, "nothing is prepared"
    assert 0 <= by_name["ssd"]["hit_rate"] <= 1
    assert by_name["transformers"]["tokens_per_round"] is None
    assert by_name["transformers"]["tok_s"] > 0
    assert (report["settings"]["num_prompts"], report["settings"]["batch"]) == (3, 2)
    assert set(report["versions"]) == {"saguaro", "torch", "transformers", "python"}
    assert set(report["machine"]) == {"cpu", "cores", "gpu"}


def test_rejection_at_a_temperature_is_of_the_same_law_only(
    pair: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["bench", *pair, "--methods", "saguaro,ngram", "--temperature", "1", "--num-prompts", "2", "--no-chat"]
    assert main.run(main.parse([*args, "--json", str(out)])) == 0
    rows = {row["method"]: row["identical_to_ar"] for row in json.loads(out.read_text())["results"]}
    assert rows == {"ar": True, "saguaro": None, "ngram": True}
    assert "law" in capsys.readouterr().out


def test_tokens_that_differ_are_an_error(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoiled(llm: LLM) -> Generate:
        run = generate_by(llm)
        return lambda *args: [[*tokens[:2], 7, 7] if llm.engine.method.drafts else tokens for tokens in run(*args)]

    monkeypatch.setattr(bench, "generate_by", spoiled)
    assert main.run(main.parse(["bench", *pair, "--methods", "ngram", "--num-prompts", "1"])) == 1
    shown = capsys.readouterr().out
    assert "OUTPUT DIFFERS: ngram is not ar, first at token 2 of output 0" in shown
    assert "NO" in shown


def test_compare_streams_every_method_in_colour(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compare", *pair, "--prompt", "the the the the", "--methods", "ngram,sd", "--color", "always"]
    assert main.run(main.parse(args)) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line.startswith("== ")] == ["== ar", "== ngram", "== sd"]
    assert "identical output: ar, ngram, sd" in shown.out
    assert "just in time" in shown.err


def test_compare_says_so_if_outputs_differ(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "_stream", lambda entrant, *_: [[1] if entrant.name == "ar" else [2]])
    assert main.run(main.parse(["compare", *pair, "--prompt", "x", "--methods", "ngram"])) == 1
    assert "OUTPUT DIFFERS" in capsys.readouterr().out


def test_runs_are_interleaved_in_an_order_that_rotates() -> None:
    order: list[tuple[str, int, int | None]] = []

    def runner(name: str) -> Generate:
        def run(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
            order.extend((name, prompt[0], own.seed) for prompt, own in zip(prompts, params, strict=True))
            return [[prompt[0]] for prompt in prompts]

        return run

    entrants = [Candidate(name, None, True) for name in "xy"]
    params = seeded(SamplingParams(seed=5), 3)
    runs = {name: runner(name) for name in "xy"}
    run_in_turn(entrants, runs, [[0], [1], [2]], params, batch=2, progress=lambda *_: None)
    seeds = [own.seed for own in params]
    asked = [("x", 0), ("x", 1), ("y", 0), ("y", 1), ("y", 2), ("x", 2)]
    assert order == [(name, prompt, seeds[prompt]) for name, prompt in asked]
    assert len(set(seeds)) == 3
    assert entrants[0].outputs == entrants[1].outputs == [[0], [1], [2]]


def test_results_of_known_runs() -> None:
    ar = Candidate("ar", None, True, Summary(), [[1, 2], [3, 4]], seconds=4.0)
    sd = Candidate("sd", None, True, Summary(), [[1, 2], [3, 5]], seconds=2.0)
    peer = Candidate("other", None, False, None, [[9], [9, 9]], seconds=1.0)
    rows = results([ar, sd, peer])
    assert [row["tok_s"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["ratio_ar"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["ratio_sd"] for row in rows] == [0.5, 1.0, 1.5]
    assert [row["identical_to_ar"] for row in rows] == [True, False, None]
    assert (first_difference(sd, ar), first_difference(ar, ar)) == ((1, 1), None)
    sd.outputs = [[1, 2], [3]]
    assert first_difference(sd, ar) == (1, 1)
    assert results([ar])[0]["ratio_sd"] is None
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table([{**row, "method": "transformers"} for row in rows]))
    assert "…" not in shown.get()
    assert "law" in shown.get()


def test_which_methods_are_compared() -> None:
    drafted = EngineConfig(draft="drop:1")
    assert method_names(None, drafted) == ["ar", "sd", "ssd"]
    assert method_names(None, EngineConfig()) == ["ar", "ngram"]
    assert method_names(" ssd, ar,ssd ", drafted) == ["ar", "ssd"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "x", "--methods", "ar,sd"],
            "method sd needs a draft model and none is given; pass draft (--draft)",
        ),
        (["--methods", "ngarm"], "method is 'ngarm'; did you mean 'ngram'?"),
        (["--method", "ssd"], "several are compared here: give --methods ssd"),
        (["--num-prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["--batch", "64"], "batch is 64; at most max_batch_rows, 32: raise --max-batch-rows"),
        (["--n", "2"], "n is 2 and max_tokens 128"),
        (["--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json: No such file or directory"),
        (["--peer", "transformers", "--presence-penalty", "1"], "presence_penalty is 1.0; transformers knows"),
        (["--peer", "transformers", "--model", "x.gguf"], "give one, or no peer"),
        (["--peer", "vllm"], "peer is 'vllm'; peers are transformers and llama.cpp"),
        (["--peer", "transformers:3"], "peer is 'transformers:3'; peers are transformers and llama.cpp"),
        (["--methods", "ar@0"], "'ar@0' asks for 0 cores; after @ stands a number from 1 to"),
        (["--methods", "ngram@x"], "'ngram@x' asks for x cores"),
    ],
)
def test_mistakes_are_explained_before_anything_is_loaded(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        main.run(main.parse(["bench", *args]))
    assert message in str(found.value)


def test_cores_are_given_and_taken_back(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    before = usable_cores(), torch.get_num_threads()
    assert main.run(main.parse(["bench", *pair, "--methods", "ar@1,sd@1", "--num-prompts", "2", "--no-chat"])) == 0
    assert "identical output: ar@1, sd@1" in capsys.readouterr().out
    assert (usable_cores(), torch.get_num_threads()) == before


def test_methods_of_other_sizes(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", *pair, "--methods", "ar,sd:1,sd:3,ssd:2:3", "--num-prompts", "2", "--no-chat"]
    assert main.run(main.parse(command)) == 0
    assert "identical output: ar, sd:1, sd:3, ssd:2:3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("methods", "flags"),
    [
        ("saguaro,ssd-uniform", ["--fan-out", "uniform", "--temperature", "0"]),
        ("saguaro", ["--saguaro-c", "0.5", "--temperature", "0"]),
        ("ar,sd", ["--nodes", "8", "--width", "2"]),
    ],
)
def test_settings_of_the_other_methods_are_none_of_ar(
    pair: tuple[str, ...], methods: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", *pair, "--methods", methods, "--num-prompts", "1", "--no-chat", *flags]
    assert main.run(main.parse(command)) == 0
    assert "identical output: ar, " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sd:x", "ssd:1:2:3", "sd:-1"])
def test_sizes_that_are_none(pair: tuple[str, ...], name: str) -> None:
    with pytest.raises(ConfigError, match="write METHOD, METHOD:K or METHOD:K:M"):
        main.run(main.parse(["bench", *pair, "--methods", name]))


@pytest.mark.parametrize("name", ["sd:0", "ssd:2:0"])
def test_sizes_that_cannot_be(pair: tuple[str, ...], name: str) -> None:
    with pytest.raises(ConfigError, match=r"(lookahead|budget) is 0"):
        main.run(main.parse(["bench", *pair, "--methods", name]))


def test_llama_cpp_is_asked_what_we_are(default_folder: Path) -> None:
    pytest.importorskip("llama_cpp")
    peer = LlamaCpp(gguf_of(default_folder), n_threads=1, n_context=64)
    prompt = load_tokenizer(default_folder, 49152).encode("Count from one to ten: one, two,")
    greedy = SamplingParams(temperature=0, max_tokens=6)
    first, second = peer.generate([prompt, prompt], [greedy, greedy])
    assert first == second
    assert len(first) == 6
    assert " three" in load_tokenizer(default_folder, 49152).decode(first)


def test_llama_cpp_reads_gguf_files_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama.cpp reads a .gguf file: give one, or no llama.cpp"):
        gguf_of(tmp_path)


def test_prompts_are_taken_in_turn(tmp_path: Path) -> None:
    for name, lines in {"a": "1\n2\n3", "b": "4"}.items():
        (tmp_path / f"{name}.txt").write_text(lines)
    assert read_prompts([tmp_path / "a.txt", tmp_path / "b.txt"], 3) == ["1", "4", "2"]
    assert read_prompts([], 2) == OURS[:2]


def test_the_peer_generates_a_batch_as_it_does_one_by_one(tmp_path: Path) -> None:
    peer = Peer(write_tiny(tmp_path / "tiny", "llama"))
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    together = peer.generate_batch(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert together == [peer.generate(prompt, 8, stops=True) for prompt in prompts]
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True)
    assert peer.generate_batch(prompts, sampled) == peer.generate_batch(prompts, sampled)
    assert [len(tokens) for tokens in peer.generate_batch(prompts, sampled)] == [8, 8, 8]
    end = int(together[0][2])
    peer.model.generation_config.eos_token_id = end
    assert peer.generate(prompts[0], 8, stops=True) == together[0][: together[0].index(end) + 1]
    check_peer("transformers", None, sampled)
    assert peer.logits([1, 2]).dtype == torch.float32
