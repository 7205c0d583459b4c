"""The Ray Serve application: replicas, what each takes, how many there are, and when one is replaced."""

import os
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from saguaro.cluster.args import ClusterArgs, ReplicaSettings
from saguaro.cluster.drafts import Services
from saguaro.cluster.replica import Replica
from saguaro.cluster.settings import PROXYS, ClusterSettings, Resources, check_limits, device_of, resources_of
from saguaro.config import EngineConfig
from saguaro.errors import ConfigError
from saguaro.serve.settings import SPARE_SECONDS, accepted_hosts

NAME = "saguaro"  # of the application and of its deployment
ROUTER = "saguaro.cluster.router.SessionRouter"
SPARE_REQUESTS = 16  # per replica, beside texts: /health, /metrics, the page
HEALTH_SECONDS = 1.0  # between two checks; three failures replace a replica
STOP_POLL_SECONDS = 0.2  # between two looks whether a replica that stops is idle
RETRY_SECONDS = 1.0  # told to clients that are refused because all replicas are full


def app(args: ClusterArgs) -> Any:
    """Build the application for `serve run`, `serve deploy` and RayService. Without keys among the arguments, that of
    SAGUARO_API_KEY counts."""
    server = args.replica.server
    check_limits(server.limits, (*PROXYS, "keep_alive_timeout"))
    keys = server.api_key or tuple(filter(None, [os.environ.get("SAGUARO_API_KEY")]))
    hosts = accepted_hosts(server.allowed_hosts, (), has_keys=bool(keys))
    server = replace(server, api_key=keys, allowed_hosts=hosts)
    if args.cluster.draft_services:
        raise ConfigError(
            f"draft_services is {args.cluster.draft_services}; only `saguaro serve --ray` starts them: start `saguaro "
            "draft` yourself, and name it as draft, tcp://HOST:PORT"
        )
    return application(replace(args.replica, server=server), args.cluster, None)


def application(settings: ReplicaSettings, cluster: ClusterSettings, services: Services | None) -> Any:
    """Replicas of these settings, as a Ray Serve application; perhaps with draft services that run already."""
    limits, engine = settings.server.limits, settings.engine
    taken = replica_resources(settings.engine, cluster)
    deployment = serve.deployment(
        name=NAME,
        ray_actor_options={"num_cpus": taken.cpus, "num_gpus": taken.gpus},
        # The engine itself refuses what is too much for it; these limits are those of requests before they reach one.
        max_ongoing_requests=engine.max_batch_rows + limits.max_waiting + SPARE_REQUESTS,
        max_queued_requests=limits.max_waiting + SPARE_REQUESTS,
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_SECONDS},
        request_router_config={"request_router_class": ROUTER},
        graceful_shutdown_timeout_s=limits.drain_seconds + SPARE_SECONDS,
        graceful_shutdown_wait_loop_s=STOP_POLL_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        logging_config={"log_level": settings.log_level.upper(), "enable_access_log": settings.access_log},
        **_replicas(cluster, engine.max_batch_rows),
    )
    return deployment(serve.ingress()(Replica)).bind(settings, device_of(engine, has_gpus()), services)


def replica_resources(engine: EngineConfig, cluster: ClusterSettings) -> Resources:
    """What a replica takes, with its own draft or with that of a service."""
    own = replace(engine, draft_device="auto") if cluster.draft_services else engine
    return resources_of(own, has_gpus())


def has_gpus() -> bool:
    """Whether a node of the cluster has a GPU."""
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU"))


def _replicas(cluster: ClusterSettings, max_rows: int) -> dict[str, Any]:
    if not cluster.is_range:
        return {"num_replicas": cluster.most}
    target = cluster.target_requests or max(1.0, max_rows / 2)
    bounds = {"min_replicas": cluster.least, "max_replicas": cluster.most}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": target}}
