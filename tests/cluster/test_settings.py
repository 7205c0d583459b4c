"""Settings of a cluster, and what is said about those that cannot be. Ray is not needed for any of it."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from saguaro.cli.commands import Draft, Serve
from saguaro.cli.main import parse
from saguaro.cli.served import check_proxied
from saguaro.cluster.args import ClusterArgs, ReplicaSettings, names
from saguaro.cluster.drafts import served_by, service_flags, service_resources
from saguaro.cluster.entrance import check_reachable
from saguaro.cluster.settings import ClusterSettings, Resources, device_of, resources_of
from saguaro.config import EngineConfig, ModelSource
from saguaro.errors import ClusterError, ConfigError
from tests.cli.here import Here


def args(**given: Any) -> ClusterArgs:
    return ClusterArgs.model_validate(given)


def test_flat_arguments_find_their_settings() -> None:
    """As a config file has them, with types, and as `serve run` has them, all of them texts."""
    typed = args(model="/m", threads=4, prefix_caching=False, api_key=["k"], max_n=3, replicas=2, max_model_len=-1)
    texts = args(model="/m", threads="4", prefix_caching="false", api_key="k", max_n="3", replicas="2")
    assert typed == texts
    assert (typed.replica.which.model, typed.replica.engine.threads) == ("/m", 4)
    assert (typed.replica.server.api_key, typed.replica.server.limits.max_n) == (("k",), 3)
    assert typed.cluster == ClusterSettings(replicas="2")


def test_every_key_belongs_to_one_settings_class() -> None:
    keys = [*names(ReplicaSettings), *names(ClusterSettings)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lookahed": 3}, "unknown key 'lookahed'; did you mean 'lookahead'"),
        ({"%": 3}, "unknown key '%'; it must be a flag of `saguaro serve`, with underscores"),
        ({"lookahead": 99}, "lookahead is 99; it must be between 1 and 64"),
        ({"replicas": "4-1"}, "replicas is '4-1'; it must be a number from 1 to 1000, or a range such as 1-4"),
        ({"draft_services": -1}, "draft_services is -1; it must be between 0 .none. and 1000"),
        ({"replicas": 0}, "replicas is '0'"),
        ({"replicas": "1-4", "target_requests": 0}, "target_requests is 0.0; it must be more than 0"),
        ({"replicas": "2", "target_requests": 3}, "target_requests is 3 and replicas '2'; it is for a range"),
        ({"api_key": " "}, "the API key is empty"),
        ({"max_n": 0}, "max_n is 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message.replace('(', '.')}"):
        args(**given)


def test_an_error_does_not_show_a_key() -> None:
    with pytest.raises(ValidationError) as caught:
        args(api_key=["secret", 3], lookahead="many")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "has_gpus", "taken"),
    [
        (EngineConfig(threads=3), False, Resources(cpus=3)),
        (EngineConfig(threads=3, device="cpu"), True, Resources(cpus=3)),
        (EngineConfig(threads=3, link="process"), False, Resources(cpus=4)),
        (EngineConfig(threads=4, tensor_parallel_size=2), False, Resources(cpus=4)),
        (EngineConfig(), True, Resources(cpus=1, gpus=1)),
        (EngineConfig(device="cuda", tensor_parallel_size=4, threads=8), False, Resources(cpus=8, gpus=4)),
        (EngineConfig(threads=2, device="cpu", draft_device="cuda"), True, Resources(cpus=2, gpus=1)),
    ],
)
def test_what_a_replica_takes(engine: EngineConfig, has_gpus: bool, taken: Resources) -> None:
    assert resources_of(engine, has_gpus) == taken
    assert device_of(engine, has_gpus) == ("cuda" if taken.gpus and engine.device != "cpu" else "cpu")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (EngineConfig(), "draft_services are for a draft model, and draft is None; name one"),
        (EngineConfig(draft="suffix"), "draft_services are for a draft model, and draft is 'suffix'; name one"),
        (
            EngineConfig(draft="tcp://box:7117"),
            "draft is 'tcp://box:7117', a service already; leave draft_services out",
        ),
        (EngineConfig(draft="drop:1", link="process"), "link is 'process', and the draft is 'tcp://"),
    ],
)
def test_what_no_draft_service_can_serve(engine: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        service_flags(ModelSource(model="/m"), engine, 2, has_gpus=False)


def test_a_draft_service_has_the_settings_of_the_draft() -> None:
    engine = EngineConfig(draft="suffix+drop:1", draft_threads=3, draft_device="cuda", dtype="float32")
    flags = service_flags(ModelSource(model="/m"), engine, 20, has_gpus=False)
    command = parse(["draft", *flags])
    assert isinstance(command, Draft)
    assert (command.model, command.target, command.threads, command.device) == ("drop:1", "/m", 3, "cuda")
    assert (command.max_sessions, command.max_rows, command.dtype) == (20, 64, "float32")
    assert service_resources(engine, has_gpus=False) == Resources(cpus=3, gpus=1)
    own = served_by(engine, "10.0.0.2:7000", Path("key"))
    assert (own.draft, own.draft_key_file, own.draft_threads) == ("suffix+tcp://10.0.0.2:7000", "key", None)
    of_default = service_flags(ModelSource(), EngineConfig(), 1, has_gpus=True)
    assert (of_default[0], of_default[-2:]) == ("--max-sessions", ["--device", "cuda"])


def test_what_ray_decides_is_not_given() -> None:
    with pytest.raises(ConfigError, match="device is 'cuda:1'; in a cluster Ray chooses the GPU: use cuda"):
        resources_of(EngineConfig(device="cuda:1"), has_gpus=True)
    with pytest.raises(ConfigError, match="threads is None; in a cluster it says how many CPUs a replica takes"):
        resources_of(EngineConfig(), has_gpus=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "2"), "--replicas is 2; it is for --ray: add it"),
        (("--ray-every-node",), "--ray-every-node is True; it is for --ray: add it"),
        (("--ray", "--replicas", "many"), "replicas is 'many'; it must be a number from 1 to 1000"),
        (("--ray", "--ray-wait", "0"), "ray_wait is 0.0; it must be more than 0"),
    ],
)
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    done = Here(capsys)("serve", *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"saguaro: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:"])
def test_an_address_has_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match=f"ray_address is '{address}'; give auto, local, or the HOST:PORT"):
        check_reachable(address)


def test_where_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        address = f"127.0.0.1:{place.getsockname()[1]}"
    with pytest.raises(ClusterError, match=rf"no Ray cluster answers at {address}: .*refused; start one with `ray"):
        check_reachable(address)


def test_where_something_else_answers() -> None:
    """Ray itself would try for minutes."""

    def answer() -> None:
        line, _ = place.accept()
        with line:
            line.recv(100)
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as place:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{place.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"what answers at {address} is no Ray cluster"):
            check_reachable(address)
        thread.join()


WITHOUT_RAY = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Bare())
from saguaro.cli.main import main
main(["serve", "--ray", "--threads", "1", "--port", "0"])
"""


def test_without_the_extra_one_line_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False)
    expected = "saguaro: --ray needs the package ray, which is not installed: install saguaro-llm[ray]\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_something_else_named_ray_is_not_the_extra(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").touch()
    script = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + WITHOUT_RAY.partition("Bare())")[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    expected = "saguaro: --ray needs the package ray, which is not installed: install saguaro-llm[ray]\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_settings_of_our_own_connections_are_refused() -> None:
    for flags, message in {
        ("--max-connections", "5"): "max_connections is 5; connections end at Ray Serve's proxies, so leave it out",
        ("--forwarded-allow-ips", "*"): "forwarded_allow_ips is '*'; Ray Serve's log names no clients",
        ("--ssl-certfile", "cert.pem"): "--ssl-keyfile is missing; Ray Serve's proxies read",
    }.items():
        command = parse(["serve", "--ray", *flags])
        assert isinstance(command, Serve)
        with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
            check_proxied(command)
