"""A replica: an actor with an engine of its own, and the server's application behind Ray Serve's proxy.

Its draft and its ranks are processes that the engine starts itself, as everywhere, so they are on the replica's node.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ray import serve

from saguaro.cluster.args import ReplicaSettings
from saguaro.cluster.drafts import Services, in_file, served_by
from saguaro.errors import Unavailable

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client.core import Metric

METRICS_SECONDS = 5.0  # for all replicas to tell their metrics


class Replica:
    """One replica. Ray Serve calls `__serve_build_asgi_app__` for the application, and `check_health` from time to
    time; a replica that is not healthy is replaced."""

    def __init__(self, settings: ReplicaSettings, device: str, services: Services | None) -> None:
        from saguaro.llm import LLM  # not above: what deploys replicas needs no torch
        from saguaro.serve.build import build_server

        logging.basicConfig(
            level=settings.log_level.upper(), stream=sys.stderr, format="%(levelname)s:     %(message)s"
        )
        self._context: Any = serve.get_replica_context()
        engine = replace(settings.engine, device=device)
        with ExitStack() as stack:
            if services is not None:
                address = services.addresses[self._context.rank.rank % len(services.addresses)]
                engine = served_by(engine, address, stack.enter_context(in_file(services.key)))
            llm = LLM(**asdict(settings.which), **asdict(engine), generation_config=settings.generation_config)
        self._service, self._app = build_server(llm, settings.server)
        self._service.read_metrics = self._metrics_of_all

    def __serve_build_asgi_app__(self) -> "FastAPI":
        return self._app

    async def about(self) -> tuple[str, str]:
        """The served name and the method."""
        return self._service.names[0], self._service.engine.method.name

    async def check_health(self) -> None:
        """Raise if the engine has broken down."""
        if self._service.front.failure is not None:
            raise Unavailable(f"the engine has broken down: {self._service.front.failure}")

    async def drain(self) -> None:
        """Refuse new requests, and return when the open ones have ended."""
        await self._service.drain()

    async def metrics(self) -> Sequence["Metric"]:
        """The metrics of this replica, labelled with its id."""
        return self._service.metrics.labelled(self._context.replica_id.unique_id)

    async def _metrics_of_all(self) -> bytes:
        """A proxy sends a request to any replica, so each of them answers for all."""
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        asked = handle.broadcast("metrics")
        try:
            told = await asked.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except TimeoutError as e:
            raise Unavailable(f"a replica did not tell its metrics within {METRICS_SECONDS:g} seconds") from e
        from saguaro.serve.prometheus import Merged

        return Merged(one for one in told if not isinstance(one, BaseException)).text()
