"""A replayed target: a verifier that answers from a recording, after the time that the target would take elsewhere.

It has no weights and no keys and values. Invariant: its outcomes are those of the recorded model, and none arrives
earlier than its step would have ended.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bench.recording import Recording
from bench.step_times import StepTimes
from saguaro.algo.tree import accept_along, nodes_at, paths_of
from saguaro.algo.verification import accept
from saguaro.device.graphs import bucket
from saguaro.errors import ConfigError
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import Transformer
from saguaro.target.request import Request
from saguaro.target.sampler import is_plain
from saguaro.target.scheduler import Batch
from saguaro.types import Outcome, Speculation

SPIN_S = 0.0005  # the last part of a wait: a sleeping thread wakes up to 0.1 ms late
BEYOND = -1  # after the last recorded token; equal to no token

now = time.perf_counter


@dataclass(frozen=True)
class CapturedShape:
    """The shape of a target's captured step: all rows have room for as many nodes, and all are computed."""

    nodes: int  # N
    lookahead: int  # K

    def n_tokens(self, n_rows: int) -> int:
        """Tokens that a step of decoding rows computes.

        >>> [CapturedShape(31, 8).n_tokens(n_rows) for n_rows in (1, 2, 3)]
        [32, 64, 68]
        """
        size = bucket(n_rows)
        return size * (nodes_at(size, self.nodes, self.lookahead) + 1)


@dataclass(frozen=True)
class Replaying:
    """A verification that ends at a given time."""

    slots: list[int]
    texts: list[list[int]]  # [B]: what the target writes next
    spec: Speculation
    took_s: float
    ends_at: float

    def outcome(self) -> Outcome:
        """Decide, and wait until the step would have ended."""
        n_accepted, bonus, path = decide(self.texts, self.spec)
        if bool((bonus == BEYOND).any()):
            raise ConfigError("a request is longer than its recording; record more tokens, or lower max_tokens")
        wait_until(self.ends_at)
        return Outcome(torch.tensor(self.slots), self.spec.length.clone(), n_accepted, bonus, path)

    def seconds(self) -> float:
        """The step's time, on a device elsewhere."""
        return self.took_s


class ReplayVerifier:
    """Answers from a recording. Its device is elsewhere, so the host continues after a launch."""

    runs_ahead = True

    def __init__(self, recording: Recording, times: StepTimes, shape: CapturedShape | None) -> None:
        """With a shape, steps of decoding rows take the time of a captured step; otherwise that of their tokens."""
        self._recording, self._times, self._shape = recording, times, shape
        self._texts: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()

    def launch(self, batch: Batch, spec: Speculation) -> Replaying:
        """See Verifier."""
        began = now()
        requests = [row.request for row in batch.sampling]
        width = spec.tokens.shape[1] + 1
        texts = [self._text(request)[request.n_output : request.n_output + width] for request in requests]
        took_s = self._times.seconds(self._n_tokens(batch, spec), len(batch.rows))
        return Replaying([request.slot for request in requests], texts, spec, took_s, began + took_s)

    def _text(self, request: Request) -> list[int]:
        """All that the target writes for this request."""
        if request not in self._texts:
            params = request.params
            if not is_plain(params) or params.logprobs is not None or params.prompt_logprobs is not None:
                raise ConfigError(
                    f"a replayed target has no logits, and the request asks for {params}; use only temperature, seed "
                    "and max_tokens"
                )
            self._texts[request] = self._recording.output(request.prompt, params.temperature, params.seed)
        return self._texts[request]

    def _n_tokens(self, batch: Batch, spec: Speculation) -> int:
        if self._shape is not None and all(row.samples and row.n_tokens == 1 for row in batch.rows):
            return self._shape.n_tokens(len(batch.rows))
        return sum(row.n_tokens for row in batch.rows) + int(spec.length.sum())


def decide(texts: Sequence[Sequence[int]], spec: Speculation) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a target accepts that writes these texts, [B][up to N+1]: n_accepted [B], bonus [B], path [B, N] of trees.

    After a node the target's token is that of the text at the node's depth. Off the text it is another one, but
    nothing is accepted there.

    >>> spec = Speculation.of([[5, 6, 7, 8]], 4, [0], [[-1, 0, 0, 2]])
    >>> decide([[5, 7, 9]], spec)
    (tensor([2]), tensor([9]), tensor([[ 0,  2, -1, -1]]))
    >>> decide([[5, 7, 9]], Speculation.of([[5, 6, 7, 8]], 4, [0]))
    (tensor([1]), tensor([7]), None)
    """
    n = spec.tokens.shape[1]
    padded = [[*text[: n + 1], *[BEYOND] * (n + 1 - len(text))] for text in texts]
    ahead = torch.tensor(padded, dtype=torch.int64).view(len(texts), n + 1)
    if spec.parent is None:
        return *accept(ahead, spec.tokens, spec.length), None
    paths, depth = paths_of(spec.parent, n)
    targets = torch.cat((ahead[:, :1], ahead.gather(1, depth)), 1)
    n_accepted, path, bonus = accept_along(targets, spec.tokens, spec.parent, spec.length, paths, depth)
    return n_accepted, bonus, path


def wait_until(moment: float) -> None:
    """Sleep, and spin at the end. Other threads run meanwhile."""
    while (left := moment - now()) > 0:
        time.sleep(max(0.0, left - SPIN_S))


def without_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, name: str) -> Transformer:
    """A model that can be described but not run: it says it is on this device, and its weights have no memory."""
    model = Transformer(spec, torch.device("meta"), dtype)
    model.device, model.format = device, name
    return model
