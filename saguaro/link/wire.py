"""The bodies of the messages between target and draft, in fixed layouts.

Invariant: for any bytes, decoding returns values within the limits or raises WireError.

A body consists of 8-byte integers and floats, so that every array is aligned and used without a copy. q, or the JSON
of grammars, comes last. Features are bfloat16, padded to 8 bytes: half the bytes of float32, and its range.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saguaro.config import DraftConfig, SamplingParams, Structured, build
from saguaro.errors import ConfigError
from saguaro.link.frame import Array, WireError
from saguaro.types import SOURCES, DraftTimes, Features, Joined, Outcome, Speculation

MAX_TEXT = 2**24  # tokens of a row, and biases: more than any context
MAX_WORDS = 2**20  # bytes of settings, of a failure's message, or of a row's grammar

_INT, _FLOAT = np.dtype("<i8"), np.dtype("<f8")
_WHOLE = ("slot", "seed", "n_prompt", "n_tokens", "n_bias", "n_words", "top_k", "prepare")
_RULES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ROW = np.dtype([(name, _INT) for name in _WHOLE] + [(name, _FLOAT) for name in _RULES])
_Q = {0: None, 4: np.dtype("<f4"), 8: np.dtype("<f8")}  # by the code in the message: bytes of a probability


@dataclass(frozen=True)
class WireLimits:
    """Limits of the numbers in a message."""

    n_vocab: int
    n_text: int
    lookahead: int
    max_rows: int
    n_features: int = 0
    n_step: int = 0
    most_text: int = MAX_TEXT  # tokens of a row

    @staticmethod
    def of(config: DraftConfig) -> "WireLimits":
        """The limits for a draft's settings."""
        sizes = (config.n_vocab, config.n_text, config.most_nodes, config.max_rows)
        return WireLimits(*sizes, config.n_features, config.n_step, min(MAX_TEXT, config.n_tokens + 1))

    @property
    def n_turn(self) -> int:
        """Maximum size of a request, in bytes."""
        texts = 8 * (self.most_text + 2 * min(self.n_text, MAX_TEXT)) + _ROW.itemsize + MAX_WORDS
        others = 8 * (16 + self.max_rows * (12 + self.lookahead)) + 2 * self.n_features * self.n_step
        return self.max_rows * texts + others

    @property
    def n_reply(self) -> int:
        """Maximum size of a reply, or of an error message in its place."""
        return max(MAX_WORDS, 8 * (9 + self.max_rows * (2 + self.lookahead * (1 + self.n_vocab))))


@dataclass(frozen=True)
class DraftRequest:
    """A message to the draft: rows that left, rows that joined, the outcome, and the rows to draft for."""

    is_afresh: bool = False  # drop all earlier rows first
    left: Sequence[int] = ()
    joined: Sequence[Joined] = ()
    outcome: Outcome = field(default_factory=Outcome.nothing)
    slots: Sequence[int] = ()
    room: Sequence[int] = ()


def encode_text(text: str) -> list[memoryview]:
    """Encode an error message."""
    return [memoryview(text.encode(errors="replace")[:MAX_WORDS])]


def decode_text(body: Array) -> str:
    """Decode an error message, even if it was cut within a character. Control characters are escaped."""
    text = body.tobytes().decode(errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def encode_settings(config: DraftConfig) -> list[memoryview]:
    """Encode a draft's settings as JSON."""
    return [memoryview(json.dumps(dataclasses.asdict(config)).encode())]


def decode_settings(body: Array) -> DraftConfig:
    """Decode a draft's settings."""
    try:
        config = build(DraftConfig, **json.loads(body.tobytes()))
    except (ValueError, TypeError, RecursionError, ConfigError) as e:
        raise WireError(f"these are no settings of a draft: {e}") from e
    least = {"n_vocab": 1, "n_text": 1, "lookahead": 1, "max_rows": 1, "n_features": 0, "n_step": 0}
    for name, low in least.items():
        value = getattr(config, name)
        if type(value) is not int or not low <= value < 2**31:
            raise WireError(f"{name} is {value!r}; it must be a whole number of at least {low}")
    return config


def encode_request(turn: DraftRequest) -> list[memoryview]:
    """Encode a request: counts, left, rows, their texts and biases, outcome, slots, room, features, grammars."""
    rows = np.empty(len(turn.joined), _ROW)
    texts: list[int] = []
    biased: list[int] = []
    biases: list[float] = []
    words: list[bytes] = []
    for at, row in enumerate(turn.joined):
        p = row.params
        top_k = min(p.top_k, 2**31)  # larger than any vocabulary
        words.append(_words(p.structured))
        sizes = (row.n_prompt, len(row.tokens), len(p.logit_bias), len(words[-1]))
        whole = (row.slot, row.seed, *sizes, top_k, p.prepare)
        rows[at] = (*whole, *(getattr(p, name) for name in _RULES))
        texts += row.tokens
        biased += p.logit_bias
        biases += p.logit_bias.values()
    decided = [_array(t) for t in _columns(turn.outcome)]
    path = np.zeros((0, 0), _INT) if turn.outcome.path is None else _array(turn.outcome.path)
    counts = [turn.is_afresh, len(turn.left), len(rows), len(texts), len(biases), len(decided[0]), len(turn.slots)]
    counts += [turn.outcome.path is not None, path.shape[1]]
    features = turn.outcome.features
    counts += [0, 0] if features is None else [len(features.slots), len(features.values)]
    arrays = [_ints(counts), _ints(turn.left), rows, _ints(texts), _ints(biased), np.array(biases, _FLOAT)]
    arrays += [*decided, path, _ints(turn.slots), _ints(turn.room)]
    ours = b"".join(array.tobytes() for array in arrays)
    if features is None:
        return [memoryview(ours + b"".join(words))]
    about = b"".join(_array(each).tobytes() for each in (features.slots, features.start, features.length))
    values = features.values.bfloat16().cpu().contiguous().view(torch.int16).reshape(-1).numpy()
    padding = b"\0" * (-values.nbytes % 8)
    return [memoryview(ours + about), values.view(np.uint8).data, memoryview(padding + b"".join(words))]


def decode_request(body: Array, limits: WireLimits) -> DraftRequest:
    """Decode a request and check every number against the limits."""
    reader = _Reader(body)
    counts = reader.ints(11, "counts", 0, limits.max_rows * MAX_TEXT).tolist()
    afresh, n_left, n_joined, n_texts, n_biases, n_decided, n_slots, is_tree, n_nodes, n_read, n_features = counts
    if is_tree > 1 or n_nodes > is_tree * limits.lookahead:
        raise WireError(f"paths of {n_nodes} nodes, of at most {limits.lookahead}")
    counted = ("left", n_left), ("joined", n_joined), ("decided", n_decided), ("asked for", n_slots), ("read", n_read)
    for name, n in counted:
        if n > limits.max_rows:
            raise WireError(f"{n} rows {name}, of at most {limits.max_rows}")
    last_slot, last_token = limits.max_rows - 1, limits.n_vocab - 1
    left = reader.ints(n_left, "slots", 0, last_slot)
    rows = reader.take(_ROW, n_joined)
    texts = reader.ints(n_texts, "tokens", 0, limits.n_text - 1)
    biased, biases = reader.ints(n_biases, "biased tokens", 0, limits.n_text - 1), reader.take(_FLOAT, n_biases)
    slots = reader.ints(n_decided, "slots", 0, last_slot)
    length = reader.ints(n_decided, "lengths", 0, limits.lookahead)
    n_accepted = reader.ints(n_decided, "numbers accepted", 0, limits.lookahead)
    bonus = reader.ints(n_decided, "bonus tokens", 0, last_token)
    if (n_accepted > length).any():
        raise WireError("more tokens were accepted than were speculated")
    path = _path(reader, n_accepted, length, n_nodes) if is_tree else None
    asked, room = reader.ints(n_slots, "slots", 0, last_slot), reader.ints(n_slots, "room", 0, 2**31)
    features = _features(reader, n_read, n_features, limits)
    wishes = [_structured(reader, int(n)) for n in rows["n_words"]]
    reader.end()
    joined = _joined(rows, texts.tolist(), biased.tolist(), biases.tolist(), wishes, limits)
    tensor = torch.from_numpy
    outcome = Outcome(tensor(slots), tensor(length), tensor(n_accepted), tensor(bonus), path, features=features)
    return DraftRequest(bool(afresh), left.tolist(), joined, outcome, asked.tolist(), room.tolist())


def encode_reply(spec: Speculation) -> list[memoryview]:
    """Encode a reply: counts, times, tokens, lengths, sources, and q without conversion."""
    n_rows, n_nodes = spec.tokens.shape
    q = None if spec.q is None else _q(spec.q)
    is_prepared = spec.times is not None and spec.times.is_prepared
    counts = _ints(
        [
            *(n_rows, n_nodes, 0 if q is None else q.itemsize, 0 if q is None else q.shape[1]),
            *(spec.times is not None, is_prepared, spec.parent is not None),
        ]
    )
    times = np.zeros(4, _FLOAT)
    if spec.times is not None:
        times[:] = (*spec.times.respond, *spec.times.prepare)
    arrays = [counts, times, *(_array(t) for t in (spec.tokens, spec.length, spec.source))]
    if spec.parent is not None:
        arrays.append(_array(spec.parent))
    parts = [memoryview(b"".join(array.tobytes() for array in arrays))]
    return parts if q is None else [*parts, q.reshape(-1).view(np.uint8).data]


def decode_reply(body: Array, n_asked: int, limits: WireLimits) -> Speculation:
    """Decode a speculation for n_asked rows. It shares the body's memory."""
    reader = _Reader(body)
    n_rows, n_nodes, q_kind, n_laws, is_timed, is_prepared, is_tree = reader.ints(7, "counts", 0, 2**31).tolist()
    if n_rows != n_asked or n_nodes > limits.lookahead or q_kind not in _Q or n_laws > n_nodes:
        shape = f"{n_rows} rows of {n_nodes} tokens with {n_laws} distributions q of {q_kind} bytes"
        raise WireError(f"{shape}, where {n_asked} rows of at most {limits.lookahead} tokens were asked for")
    times = reader.take(_FLOAT, 4).tolist()
    tokens = reader.ints(n_rows * n_nodes, "tokens", 0, limits.n_vocab - 1)
    length = reader.ints(n_rows, "lengths", 0, n_nodes)
    source = reader.ints(n_rows, "sources", 0, len(SOURCES) - 1)
    parent = None
    if is_tree:
        found = reader.ints(n_rows * n_nodes, "parents", -1, n_nodes - 1).reshape(n_rows, n_nodes)
        if (found >= np.arange(n_nodes)).any():
            raise WireError("a node whose parent does not come before it")
        parent = torch.from_numpy(found)
    q, kind = None, _Q[q_kind]
    if kind is not None:
        flat = reader.take(kind, n_rows * n_laws * limits.n_vocab)
        q = torch.from_numpy(flat.astype(kind.newbyteorder("="), copy=False)).view(n_rows, n_laws, limits.n_vocab)
        _check_families(n_laws, length.tolist(), None if parent is None else parent.tolist())
    reader.end()
    return Speculation(
        tokens=torch.from_numpy(tokens).view(n_rows, n_nodes),
        length=torch.from_numpy(length),
        source=torch.from_numpy(source),
        q=q,
        times=DraftTimes((times[0], times[1]), (times[2], times[3]), bool(is_prepared)) if is_timed else None,
        parent=parent,
    )


def _check_families(n_laws: int, length: list[int], parents: list[list[int]] | None) -> None:
    """Every family of nodes must have its distribution."""
    most = max(length, default=0)
    if parents is not None:
        most = max((len(set(own[:n])) for own, n in zip(parents, length, strict=True)), default=0)
    if most > n_laws:
        raise WireError(f"{most} families of nodes with {n_laws} distributions")


def _path(reader: "_Reader", n_accepted: Array, length: Array, n_nodes: int) -> Tensor:  # [B, n_nodes]
    """The accepted nodes of every row, which rise, lie within its speculation, and are followed by -1."""
    path = reader.ints(len(length) * n_nodes, "nodes", -1, n_nodes - 1).reshape(len(length), n_nodes)
    for nodes, n, end in zip(path.tolist(), n_accepted.tolist(), length.tolist(), strict=True):
        own = nodes[:n]
        if len(own) < n or any(node != -1 for node in nodes[n:]) or own != sorted({*own} & {*range(end)}):
            raise WireError(f"the nodes {nodes} are no path of {n} nodes out of {end}")
    return torch.from_numpy(path)


def _features(reader: "_Reader", n_rows: int, n_tokens: int, limits: WireLimits) -> Features | None:
    """Features of so many tokens of so many rows. They share the body's memory."""
    if n_rows == n_tokens == 0:
        return None
    if n_tokens > limits.n_step or not limits.n_features:
        most = limits.n_step if limits.n_features else 0
        raise WireError(f"features of {n_tokens} tokens, of at most {most}")
    slots = reader.ints(n_rows, "slots", 0, limits.max_rows - 1)
    start = reader.ints(n_rows, "starts", 0, MAX_TEXT)
    length = reader.ints(n_rows, "lengths", 0, limits.n_step)
    if int(length.sum()) != n_tokens:
        raise WireError(f"features of {n_tokens} tokens, of which the rows claim {int(length.sum())}")
    n = n_tokens * limits.n_features
    bits = reader.take(np.dtype("<i2"), n).astype(np.int16, copy=False)
    reader.take(np.dtype(np.uint8), -2 * n % 8)
    values = torch.from_numpy(bits).view(torch.bfloat16).view(n_tokens, limits.n_features)
    return Features(torch.from_numpy(slots), torch.from_numpy(start), torch.from_numpy(length), values)


class _Reader:
    """Reads consecutive arrays from a body, with bounds checks."""

    def __init__(self, body: Array) -> None:
        self._body, self._at = body, 0

    def take(self, dtype: "np.dtype[Any]", n: int) -> Array:
        """The next n items; they share the body's memory."""
        n_bytes = n * dtype.itemsize
        if n_bytes > len(self._body) - self._at:
            raise WireError(f"a body of {len(self._body)} bytes ends before its {n_bytes} bytes from {self._at} on")
        self._at += n_bytes
        return self._body[self._at - n_bytes : self._at].view(dtype)

    def ints(self, n: int, name: str, low: int, high: int) -> Array:
        """The next n integers, each within low..high."""
        array = self.take(_INT, n).astype(np.int64, copy=False)
        few = array.tolist() if n < 100 else [int(array.min()), int(array.max())]  # numpy is slow for small arrays
        if few and (min(few) < low or max(few) > high):
            raise WireError(f"{name} from {min(few)} to {max(few)}; they must be within {low}..{high}")
        return array

    def end(self) -> None:
        """Check that the whole body was read."""
        if self._at != len(self._body):
            raise WireError(f"a body of {len(self._body)} bytes says all it has to say in {self._at}")


def _words(structured: Structured | None) -> bytes:
    """A grammar as JSON; empty if there is none."""
    if structured is None:
        return b""
    return json.dumps({structured.kind: getattr(structured, structured.kind)}, ensure_ascii=False).encode()


def _structured(reader: _Reader, n: int) -> Structured | None:
    """Decode a grammar of n bytes."""
    if not 0 <= n <= MAX_WORDS:
        raise WireError(f"a grammar of {n} bytes, of at most {MAX_WORDS}")
    words = reader.take(np.dtype(np.uint8), n).tobytes()
    try:
        return build(Structured, **json.loads(words)) if words else None
    except (ValueError, TypeError, RecursionError) as e:  # ConfigError is a ValueError
        raise WireError(f"these are no words of a grammar: {e}") from e


def _joined(
    rows: Array,
    texts: list[int],
    biased: list[int],
    biases: list[float],
    wishes: list[Structured | None],
    limits: WireLimits,
) -> list[Joined]:
    """Build the rows that joined, each with its part of the texts and biases, and its grammar."""
    out: list[Joined] = []
    token = bias = 0
    for row, structured in zip(rows, wishes, strict=True):
        slot, seed, n_prompt, n_tokens, n_bias, _, top_k, prepare = (int(row[name]) for name in _WHOLE)
        if not (
            0 <= slot < limits.max_rows and seed >= 0 and 0 <= n_prompt <= n_tokens and n_bias >= 0 <= prepare <= 1
        ):
            raise WireError(f"slot {slot}, seed {seed}, {n_prompt} of {n_tokens} tokens and {n_bias} biases are no row")
        if token + n_tokens > len(texts) or bias + n_bias > len(biases):
            raise WireError("the rows claim more text than came with them")
        rules: dict[str, Any] = {name: float(row[name]) for name in _RULES}
        added = dict(zip(biased[bias : bias + n_bias], biases[bias : bias + n_bias], strict=True))
        try:
            rules |= {"top_k": top_k, "prepare": bool(prepare), "logit_bias": added, "structured": structured}
            params = SamplingParams(**rules)
        except ConfigError as e:
            raise WireError(f"a row with impossible parameters: {e}") from e
        out.append(Joined(slot, texts[token : token + n_tokens], n_prompt, seed, params))
        token, bias = token + n_tokens, bias + n_bias
    if token != len(texts) or bias != len(biases):
        raise WireError("more text came than the rows claim")
    return out


def _columns(outcome: Outcome) -> tuple[Tensor, ...]:
    return outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus


def _ints(values: Sequence[int]) -> Array:
    return np.array(values, _INT)


def _array(tensor: Tensor) -> Array:
    return tensor.cpu().numpy().astype(_INT, copy=False)


def _q(q: Tensor) -> Array:
    """q as little-endian float32 or float64; half precision is converted exactly."""
    plain = q if q.dtype in (torch.float32, torch.float64) else q.float()
    array: Array = plain.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)
