"""Flags as people type them, those of vLLM among them: what they mean, and what is said about those that cannot be."""

from typing import Any

import pytest

from saguaro.cli.args import ModelArgs
from saguaro.cli.commands import Generate, Serve
from saguaro.cli.main import parse
from saguaro.config import EngineConfig
from saguaro.errors import ConfigError
from saguaro.kv.memory import plan_kv
from saguaro.method import METHODS


def served(*args: str) -> Serve:
    command = parse(["serve", *args])
    assert isinstance(command, Serve)
    return command


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins", "--allowed-hosts"])
def test_a_flag_takes_one_value_and_leaves_the_model_alone(flag: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    once, twice = served(flag, "k", "MODEL"), served(flag, "k", flag, "l", "MODEL")
    assert (getattr(once, field), once.which.model) == (("k",), "MODEL")
    assert (getattr(twice, field), twice.which.model) == (("k", "l"), "MODEL")


@pytest.mark.parametrize("args", [("M",), ("--model", "M"), ("M", "--model", "M"), ("--model", "M", "M")])
def test_the_model_is_named_by_its_place_or_by_a_flag(args: tuple[str, ...]) -> None:
    assert served(*args, "--revision", "r").which == ModelArgs(model="M", revision="r")
    assert served().which.model is None


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model is 'A' and --model 'B'; give one of them"):
        _ = served("A", "--model", "B").which


def test_repeated_flags_of_other_commands_add_up() -> None:
    args = ("--stop", "a", "--stop", "b", "--stop-token-ids", "3", "--stop-token-ids", "4")
    command = parse(["generate", "--prompt", "x", *args, "--choice", "yes", "--choice", "no"])
    assert isinstance(command, Generate)
    assert command.sampling.params().stop == ("a", "b")
    assert command.sampling.params().stop_token_ids == (3, 4)
    structured = command.shape.structured()
    assert structured is not None
    assert structured.choice == ("yes", "no")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "info"])
def test_the_help_names_every_method(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f" {name} (" in out for name in METHODS), out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--max-model-len", "auto"), {"max_model_len": None}),
        (("--max-model-len", "-1"), {"max_model_len": None}),
        (("--max-model-len", "300"), {"max_model_len": 300}),
        (("--dtype", "float"), {"dtype": "float32"}),
        (("--dtype", "bfloat16"), {"dtype": "bfloat16"}),
        (("--quantization", "fp8"), {"dtype": "fp8", "quantization": "fp8"}),
        (("--quantization", "fp8", "--dtype", "bfloat16"), {"dtype": "fp8", "quantization": "fp8"}),
        (("--tensor-parallel-size", "2"), {"tensor_parallel_size": 2}),
        (("--gpu-memory-utilization", "0.85"), {"gpu_memory_utilization": 0.85}),
        (("--max-inter-token-ms", "80"), {"max_inter_token_ms": 80.0}),
    ],
)
def test_flags_of_vllm(args: tuple[str, ...], expected: dict[str, Any]) -> None:
    config = served(*args).engine.config()
    assert {name: getattr(config, name) for name in expected} == expected
    assert config == EngineConfig(**expected)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--quantization", "awq"), "quantization is 'awq'; it must be fp8 or none; how a checkpoint is quantised is"),
        (
            ("--quantization", "fp8", "--dtype", "int8"),
            "dtype is 'int8'; it must be auto or bfloat16 with quantization",
        ),
        (("--tensor-parallel-size", "0"), "tensor_parallel_size is 0; it must be between 1 and 64"),
        (("--tensor-parallel-size", "-1"), "tensor_parallel_size is -1; it must be between 1 and 64"),
        (("--gpu-memory-utilization", "0"), "gpu_memory_utilization is 0.0; it must be more than 0 and at most 1"),
        (("--gpu-memory-utilization", "90"), "gpu_memory_utilization is 90.0; it must be more than 0 and at most 1"),
        (("--gpu-memory-utilization", "0.5", "--kv-memory", "1GiB"), "give one of them"),
        (("--max-model-len", "-2"), "max_model_len is -2; it must be between 2 and"),
        (("--max-model-len", str(10**12)), f"max_model_len is {10**12}; it must be between 2 and"),
        (("--max-num-seqs", "0"), "max_batch_rows is 0; it must be between 1 and 4096"),
        (("--max-num-seqs", str(10**9)), f"max_batch_rows is {10**9}; it must be between 1 and 4096"),
        (("--max-num-batched-tokens", str(10**9)), "max_batch_tokens is 1000000000; it must be between"),
        (("--block-size", str(10**9)), "page_size is 1000000000; it must be between 1 and 1024"),
        (("--threads", str(10**9)), "threads is 1000000000; it must be between 1 and 1024, or None"),
        (("--draft-threads", "-3"), "draft_threads is -3; it must be between 1 and 1024"),
        (("--draft-timeout", "1e300"), "draft_timeout is 1e+300; it must be more than 0 and at most 3600"),
    ],
)
def test_values_that_cannot_be_are_refused_in_a_sentence(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        served(*args).engine.config()
    assert said in str(refused.value)


def test_a_length_may_be_automatic_in_python_too() -> None:
    automatic: Any = "auto"
    assert EngineConfig(max_model_len=automatic) == EngineConfig(max_model_len=-1) == EngineConfig()


def test_a_share_of_a_gpu_is_for_a_gpu() -> None:
    import torch

    from tests.target.test_round import SPEC

    config = EngineConfig(gpu_memory_utilization=0.5)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization is 0.5, and the model computes on cpu: use kv_memory"
    ):
        plan_kv(config, SPEC, torch.device("cpu"), torch.float32)
