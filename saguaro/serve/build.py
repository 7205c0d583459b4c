"""Builds what serves a model over HTTP, for the server's own process and for a replica of a cluster."""

import logging
import sys

from fastapi import FastAPI

from saguaro.llm import LLM
from saguaro.serve.http.app import create_app
from saguaro.serve.http.service import Service
from saguaro.serve.settings import ServerSettings

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.001  # how long the event loop waits for a computing thread; Python's default is 0.005


def build_server(llm: LLM, settings: ServerSettings) -> tuple[Service, FastAPI]:
    """The service of a loaded model, warmed up, and its application. Sets the interpreter's switch interval."""
    sys.setswitchinterval(SWITCH_SECONDS)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in llm.engine.startup.items())
    log.info("loaded, in seconds: %s", parts)
    log.info("%s", llm.engine.preparation)
    names = settings.served_model_name or (llm.engine.loaded.name,)
    service = Service(llm.engine, names, settings.limits, settings.parsers, llm.recommended)
    app = create_app(
        service,
        api_keys=settings.api_key,
        allowed_origins=settings.allowed_origins,
        allowed_hosts=settings.allowed_hosts,
    )
    service.warm()
    return service, app
