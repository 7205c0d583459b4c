"""`saguaro draft`: serves a draft model to targets until a signal ends it."""

import logging
import math
import signal
import sys
from pathlib import Path

import torch

from saguaro.cli import commands
from saguaro.cli.progress import progress_bar
from saguaro.config import MAX_ROWS, MAX_THREADS
from saguaro.engine.assembly import find_device
from saguaro.errors import ConfigError
from saguaro.kernels.formats import find_format
from saguaro.link.address import Address, listen, name_of
from saguaro.link.handshake import read_key
from saguaro.link.served import ServedModel, Source, load_served
from saguaro.link.service import Service
from saguaro.link.session import Served
from saguaro.llm import default_cache
from saguaro.model.default import DRAFT, fetch_default
from saguaro.model.load import locate

MOST_SESSIONS, MOST_TOKENS = 256, 2**31


def draft(command: commands.Draft) -> int:
    """Serve until a signal ends the service."""
    check(command)
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(levelname)s:     %(message)s")
    key = read_key(command.key_file)
    place = listen(Address.of(command.listen), bool(key))
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    with place:
        model = load(command)
        served = Served(
            offer=model.offer,
            key=key,
            build=model.build,
            max_sessions=command.max_sessions,
            status_s=command.status_seconds,
            threads=torch.get_num_threads(),
        )
        service = Service(place, served)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        at = name_of(place.getsockname())
        print(f"saguaro: serving the draft {model.terms.model} on tcp://{at}", file=sys.stderr, flush=True)
        service.run()
    return 0


def load(command: commands.Draft) -> ServedModel:
    """Load the draft; without a model, the default one."""
    device = find_device("device", command.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with progress_bar() as progress:
        name, target = command.model, None if command.target is None else locate(command.target)
        if name is None:
            name = str(DRAFT)
            target = target or fetch_default(Path(command.cache_dir or default_cache()), progress)
        source = Source(draft=name, target=target, device=device, dtype=find_format(command.dtype, device))
        progress("loading the draft", 0, 1)
        model = load_served(source, max_rows=command.max_rows, max_tokens=command.max_tokens)
        progress("loading the draft", 1, 1)
    return model


def check(command: commands.Draft) -> None:
    """Refuse settings that are never valid."""
    limits = {
        "max_sessions": MOST_SESSIONS,
        "max_rows": MAX_ROWS,
        "max_tokens": MOST_TOKENS,
        "threads": MAX_THREADS,
    }
    for name, most in limits.items():
        value = getattr(command, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}; it must be between 1 and {most}")
    if not 0.01 <= command.status_seconds < math.inf:
        raise ConfigError(f"status_seconds is {command.status_seconds:g}; it must be at least 0.01")
