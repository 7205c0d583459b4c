"""`saguaro serve --ray`: joins or starts a Ray cluster, serves there until a signal comes, and ends what it started.

Invariant: nothing waits for ever. Room that a cluster does not have, and replicas that cannot start, are errors.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saguaro.cluster.args import ReplicaSettings
from saguaro.cluster.drafts import DraftService, Services, new_key, service_flags, service_resources
from saguaro.cluster.entrance import Entrance, check_reachable, reason_of, told_to_end
from saguaro.cluster.settings import ClusterSettings, Resources
from saguaro.errors import ClusterError, ConfigError
from saguaro.serve.address import bind
from saguaro.serve.settings import SPARE_SECONDS

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.api import RunTarget
    from ray.serve.exceptions import RayServeException
    from ray.util.placement_group import placement_group, remove_placement_group
except ImportError as e:  # or something else is named ray
    raise ConfigError(f"--ray needs the package {e.name}, which is not installed: install saguaro-llm[ray]") from e

from saguaro.cluster.application import NAME, application, has_gpus, replica_resources

START_SECONDS = 600.0  # for a draft service
POLL_SECONDS = 0.2  # while replicas start
WATCH_SECONDS = 2.0  # between two looks at a cluster that serves


def serve_on_ray(settings: ReplicaSettings, cluster: ClusterSettings, entrance: Entrance) -> int:
    """Serve until a signal comes."""
    with bind(entrance.host, entrance.port) as place:  # refuse a port in use before anything starts
        port = place.getsockname()[1]
    with connected(entrance.ray_address), told_to_end() as is_told:
        if serve.status().proxies:
            raise ClusterError(
                "Ray Serve runs in this cluster already; deploy saguaro.cluster:app there with `serve deploy`, or end "
                "it with `serve shutdown`"
            )
        with draft_services(settings, cluster, entrance.wait_s) as services:
            taken = replica_resources(settings.engine, cluster)
            check_room("replicas", cluster.least, taken, entrance.wait_s)
            try:
                start(application(settings, cluster, services), settings, entrance, port)
                if wait_until_running(is_told):
                    handle = serve.get_app_handle(NAME)
                    name, method = handle.broadcast("about").results()[0]
                    where = f"{cluster.replicas} x {taken}, on {entrance.url(port)}"
                    print(f"saguaro: serving {name} with {method}, {where}", file=sys.stderr)
                    watch(is_told)
                    drain(handle, settings.server.limits.drain_seconds)
            finally:
                serve.shutdown()
    return 0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be a driver of the cluster at this address; None: of the one on this machine, or of a new one."""
    if address not in (None, "auto", "local"):
        check_reachable(str(address))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here sends no usage reports
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # What replicas log is in Ray's log files; its own messages about them are no errors of this command.
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        try:
            ray.init(address=address or "auto", **quiet)
        except ConnectionError as e:
            if address is not None or "Could not find any running Ray" not in str(e):
                raise
            ray.init(address="local", include_dashboard=False, **quiet)
            print("saguaro: no Ray cluster runs on this machine; one was started", file=sys.stderr)
    except (ConnectionError, ValueError, RuntimeError, RayError) as e:
        why = str(e).strip().splitlines()[0]
        raise ClusterError(
            f"the Ray cluster {address or 'auto'!r} cannot be joined: {why}; it must have the same versions of Ray and "
            "Python, and where it asks for a token, RAY_AUTH_MODE=token and the token must be set here too"
        ) from e
    try:
        yield
    except (RayError, RayServeException) as e:
        raise ClusterError(f"the Ray cluster has failed: {reason_of(str(e))}") from e
    finally:
        ray.shutdown()


@contextmanager
def draft_services(settings: ReplicaSettings, cluster: ClusterSettings, seconds: float) -> Iterator[Services | None]:
    """The draft services of these settings, started; None without any."""
    if not cluster.draft_services:
        yield None
        return
    flags = service_flags(settings.which, settings.engine, cluster.most, has_gpus())
    taken, key = service_resources(settings.engine, has_gpus()), new_key()
    check_room("draft services", cluster.draft_services, taken, seconds)
    kind = ray.remote(DraftService).options(num_cpus=taken.cpus, num_gpus=taken.gpus)
    actors = [kind.remote(flags, key) for _ in range(cluster.draft_services)]
    try:
        try:
            addresses = ray.get([one.address.remote() for one in actors], timeout=START_SECONDS)
        except RayError as e:
            raise ClusterError(reason_of(str(e))) from e
        yield Services(tuple(addresses), key)
    finally:
        for one in actors:
            ray.kill(one)


def check_room(what: str, n: int, each: Resources, seconds: float) -> None:
    """Reserve what these actors take, and release it: what cannot be reserved in time is an error."""
    bundle = {"CPU": each.cpus, "GPU": each.gpus} if each.gpus else {"CPU": each.cpus}
    group = placement_group([bundle] * n)
    try:
        if group.wait(seconds):
            return
        nodes = ", ".join(str(_resources(node["Resources"])) for node in ray.nodes() if node["Alive"])
        raise ClusterError(
            f"{what} need {n} x {each}, each on one node, which were not free within {seconds:g} seconds; the nodes "
            f"have {nodes}, of which {_resources(ray.available_resources())} are free: add nodes, end what takes them, "
            f"or ask for fewer {what} or --threads"
        )
    finally:
        remove_placement_group(group)


def _resources(resources: dict[str, float]) -> Resources:
    return Resources(cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))


def start(app: Any, settings: ReplicaSettings, entrance: Entrance, port: int) -> None:
    """Start proxies and an application. Returns before they run."""
    files = {"ssl_keyfile": entrance.ssl_keyfile, "ssl_certfile": entrance.ssl_certfile}
    serve.start(
        proxy_location="EveryNode" if entrance.every_node else "HeadOnly",
        http_options={
            "host": entrance.host,
            "port": port,
            "keep_alive_timeout_s": settings.server.limits.keep_alive_timeout,
            **{name: str(path.absolute()) for name, path in files.items() if path is not None},
        },
        logging_config={"log_level": "DEBUG" if settings.log_level == "debug" else "WARNING"},
    )
    serve.run_many([RunTarget(app, name=NAME, route_prefix="/")], wait_for_applications_running=False)


def wait_until_running(is_told: threading.Event) -> bool:
    """Whether the replicas run; false after a signal. Raises if one of them cannot start."""
    while not is_told.wait(POLL_SECONDS):
        found = serve.status().applications[NAME]
        for one in found.deployments.values():
            if "Traceback" in one.message or found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise ClusterError(f"a replica cannot start: {reason_of(one.message or found.message)}")
        if found.status == "RUNNING":
            return True
    return False


def watch(is_told: threading.Event) -> None:
    """Return after a signal. Says when the application's state changes; raises if it is gone."""
    state = "RUNNING"
    while not is_told.wait(WATCH_SECONDS):
        found = serve.status().applications.get(NAME)
        if found is None:
            raise ClusterError("the application was deleted from the cluster by another command")
        if found.status != state:
            state = found.status
            print(f"saguaro: the replicas are {state.value} now", file=sys.stderr)


def drain(handle: Any, seconds: float) -> None:
    """Let all replicas finish what they serve while they refuse new requests, and let their responses be sent."""
    try:
        handle.broadcast("drain").results(timeout_s=seconds + SPARE_SECONDS, return_exceptions=True)
        serve.delete(NAME)
    except TimeoutError:
        print(f"saguaro: a replica does not answer {seconds:g} seconds later; it is ended", file=sys.stderr)
