"""A rank other than 0: its part of the model, a runner for each engine, and the orders that it follows."""

import os
import socket
import sys
import traceback
from pathlib import Path

import torch

from saguaro.device.graphs import guard
from saguaro.errors import SaguaroError
from saguaro.kernels.bundle import kernels_for
from saguaro.kernels.formats import computed_in, packed_kind, ready
from saguaro.link.channel import Channel
from saguaro.link.frame import Message, MessageKind
from saguaro.model.load import load
from saguaro.model.split import ALONE, Exchange, Split
from saguaro.model.transformer import Transformer
from saguaro.parallel.exchange import ExchangeLost, SharedExchange, SharedMemory, TorchExchange
from saguaro.parallel.orders import (
    MOST_BYTES,
    Join,
    Load,
    Numbers,
    Open,
    Order,
    decode,
    decode_answered,
    decode_rows,
    shape_of,
)
from saguaro.runner.runner import Runner
from saguaro.target.shape import build_runner

CUT_OFF = 3  # exit status: another rank ended
MOST_WORDS = 10_000  # bytes of an error message


def serve(link: socket.socket, shared: int | None) -> int:
    """Follow orders until the other end closes; shared: a descriptor. Returns the exit status."""
    channel, rank = Channel(link, MOST_BYTES), Rank(shared)
    try:
        while True:
            message = _next(channel)
            if message.kind is MessageKind.TURN:
                rank.follow(decode(message.body))
            else:
                rank.answer(decode_answered(message.body))
                _send(channel, MessageKind.READY, b"")
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # rank 0 is gone
    except ExchangeLost as e:
        print(e, file=sys.stderr)
        return CUT_OFF
    except Exception as e:
        traceback.print_exc()  # rank 0 shows this output if the message is lost
        text = str(e) if isinstance(e, SaguaroError) else f"{type(e).__name__}: {e}"
        _send(channel, MessageKind.FAILED, text.encode()[:MOST_WORDS])
        return 1


class Rank:
    """What a rank holds."""

    def __init__(self, shared: int | None) -> None:
        self._shared = shared
        self._split, self._device = ALONE, torch.device("cpu")
        self._model: Transformer | None = None
        self._runners: dict[int, Runner] = {}

    def answer(self, order: Join | Load | Open) -> None:
        """Carry out an order that rank 0 waits for."""
        if isinstance(order, Join):
            self._device = torch.device(order.device)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._split = Split(order.rank, order.size, self._exchange(order))
        elif isinstance(order, Load):
            dtype, kind = computed_in(order.dtype), packed_kind(order.dtype, self._device)
            model = load(order.name, Path(order.path), self._device, dtype, kind, split=self._split).model
            self._model = ready(model, order.dtype)
        else:
            assert self._model is not None, "a rank loads before it opens"
            if order.cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, order.cores)
            torch.set_num_threads(order.threads)
            self._runners[order.runner] = build_runner(self._model, shape_of(order), kernels_for(self._device))

    def _exchange(self, order: Join) -> Exchange:
        if order.backend == "shared":
            return SharedExchange(order.rank, order.size, SharedMemory(order.size, self._shared))
        return TorchExchange(order.rank, order.size, Path(order.store), self._device)

    @torch.inference_mode()
    def follow(self, given: Numbers) -> None:
        """Do what rank 0 does at the same time."""
        if given.order is Order.CLOSE:
            del self._runners[given.runner]
            return
        runner = self._runners[given.runner]
        with guard(runner.device), runner.threads():
            if given.order is Order.STEP:
                runner.run(*decode_rows(given.rest))
            elif given.order is Order.WARM:
                runner.warm(int(given.rest[0]))
            elif given.order is Order.MOVE:
                runner.move(*torch.from_numpy(given.rest).split(len(given.rest) // 2))
            else:
                shape = int(given.rest[0]), runner.model.spec.hidden
                hidden = torch.zeros(shape, dtype=runner.model.dtype, device=runner.device)
                runner.logits(self._split.exchange(hidden)[0])


def _next(channel: Channel) -> Message:
    """Wait for the next message."""
    while (message := channel.receive()) is None:
        channel.wait(None)
    return message


def _send(channel: Channel, kind: MessageKind, body: bytes) -> None:
    """Answer the last message."""
    channel.post(kind, channel.received, [memoryview(body)])
    while not channel.flush():
        channel.wait(None)
