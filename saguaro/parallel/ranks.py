"""The ranks of a divided target, seen from rank 0, which is the engine's process.

Every rank runs the same steps on its part of the model. Rank 0 says which: one message a step to each rank. What the
ranks compute is exchanged between them (parallel.exchange).

Invariant: a step that does not end as it should leaves ranks that wait for each other. Then all of them are ended, and
every later use raises RankError with the reason.
"""

import select
import shutil
import signal
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch

from saguaro.device.affinity import Affinity
from saguaro.errors import ConfigError, RankError
from saguaro.kernels.formats import computed_in, packed_kind, ready
from saguaro.link.frame import MessageKind
from saguaro.model.load import Loaded, load
from saguaro.model.split import Exchange, Split
from saguaro.parallel.exchange import (
    ExchangeLost,
    SharedExchange,
    SharedMemory,
    TorchExchange,
    backend_for,
)
from saguaro.parallel.orders import Answered, Join, Load, Open, Order, encode, encode_answered
from saguaro.parallel.process import GRACE, WORKER, RankProcess
from saguaro.target.shape import RunnerShape
from saguaro.types import Progress

START_SECONDS = 600.0  # for a process to begin, and for the group to meet
LOAD_SECONDS = 1800.0  # for a rank's part of a model


class Ranks:
    """Ranks 1 to N - 1."""

    def __init__(
        self, size: int, device: torch.device, backend: str | None = None, worker: Sequence[str] = WORKER
    ) -> None:
        """Start them; device: rank 0's, and GPUs follow one another from there. backend: of exchanges; None: the
        fastest."""
        devices = rank_devices(size, device)
        backend = backend or backend_for(device)
        self.size, self.device, self.failure = size, device, ""
        self._lock, self._is_closed, self._has_lost = threading.Lock(), False, False
        self._dropped: deque[int] = deque()  # runners that were collected; a finalizer only appends here
        self._runners: set[int] = set()
        self._n_runners = 0
        threads = max(1, torch.get_num_threads() // size)
        self._memory = SharedMemory(size) if backend == "shared" else None
        self._on_end: Callable[[], None] = lambda: None
        self._clean: Callable[[], object] = lambda: None
        shared = None if self._memory is None else self._memory.fd
        self._others = [RankProcess(rank, threads, shared, worker) for rank in range(1, size)]
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()
        store = self._new_store() if backend != "shared" else Path()
        with self._guarded():
            for each in self._others:
                on = str(devices[each.rank])
                self._tell(each, Join(rank=each.rank, size=size, backend=backend, store=str(store), device=on))
            self.split = Split(0, size, self._exchange(store))
            self._wait(START_SECONDS)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 to N - 1."""
        return [each.pid for each in self._others]

    def load(self, name: str, path: Path, dtype: str, progress: Progress = lambda *_: None) -> Loaded:
        """Load a model; every rank reads its own part of the files. Returns rank 0's."""
        with self._lock, self._guarded():
            for each in self._others:
                self._tell(each, Load(name=name, path=str(path.absolute()), dtype=dtype))
            of, kind = computed_in(dtype), packed_kind(dtype, self.device)
            loaded = load(name, path, self.device, of, kind, progress, self.split)
            ready(loaded.model, dtype, progress)
            self._wait(LOAD_SECONDS)
        return loaded

    def open(self, shape: RunnerShape, affinities: Sequence[Affinity]) -> int:
        """Let every rank build a runner for the model loaded last. Returns its number."""
        with self._lock, self._guarded():
            self._n_runners += 1
            for each in self._others:
                own = affinities[each.rank]
                cores = None if own.cores is None else sorted(own.cores)
                open_ = Open(runner=self._n_runners, shape=asdict(shape), cores=cores, threads=own.threads or 1)
                self._tell(each, open_)
            self._wait(LOAD_SECONDS)
            self._runners.add(self._n_runners)
            return self._n_runners

    @contextmanager
    def together(self, order: Order, runner: int, rest: Sequence[int] = ()) -> Iterator[None]:
        """Send an order to all ranks. The body is rank 0's part of it; Ctrl-C waits for its end."""
        with self._lock, uninterrupted(), self._guarded():
            while self._dropped:
                self._close(self._dropped.popleft())
            self._send(order, runner, rest)
            yield

    def drop(self, runner: int) -> None:
        """Close a runner before the next order. May be called at any time, also by a finalizer."""
        self._dropped.append(runner)

    def leave(self, runner: int) -> None:
        """Close a runner; after the last one, end all ranks."""
        if runner in self._runners and not self.failure:
            with self._lock, self._guarded():
                self._close(runner)
        self._runners.discard(runner)
        if not self._runners:
            self.close()

    def close(self) -> None:
        """End all ranks."""
        self._is_closed = True
        self.failure = self.failure or "the ranks of this target were ended; make a new engine"
        for each in self._others:
            each.close()
        self._clean()

    def check(self) -> None:
        """Raise if a rank has ended."""
        if self._has_lost and not self.failure:
            self.failure = self._why() or "a rank of the target has ended; start the engine again"
        if self.failure:
            raise RankError(self.failure)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call on_end, in another thread, when a rank ends by itself."""
        self._on_end = on_end

    @property
    def lives(self) -> Sequence[int]:
        """Descriptors that can be read when a rank has ended; empty if all were ended here."""
        return () if self._is_closed else [each.life.fileno() for each in self._others]

    def lose(self) -> None:
        """A rank has ended by itself: those that wait for it give up."""
        self._has_lost = True
        if self._memory is not None:
            self._memory.lose()
        self._on_end()

    def _new_store(self) -> Path:
        """A file for a process group. It is kept, because NCCL reads it when it is first used."""
        folder = tempfile.mkdtemp(prefix="saguaro-ranks-")
        self._clean = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "store"

    def _exchange(self, store: Path) -> Exchange:
        if self._memory is not None:
            return SharedExchange(0, self.size, self._memory)
        return TorchExchange(0, self.size, store, self.device)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever is raised within leaves the ranks out of step."""
        if self.failure:
            raise RankError(self.failure)
        try:
            yield
        except BaseException as e:
            why = self._why() if isinstance(e, ExchangeLost) else None
            cause = str(e) if isinstance(e, RankError) else f"a step of the divided target broke off ({e!r})"
            self.failure = why or cause
            for each in self._others:
                each.close()
            if why is not None:
                raise RankError(why) from e
            raise

    def _why(self) -> str | None:
        """Which rank ended, and why; of several the first that did not end because of another."""
        ended = (each.why_ended(GRACE / len(self._others)) for each in self._others)
        return next((why for why in ended if why is not None), None)

    def _tell(self, rank: RankProcess, order: Answered) -> None:
        rank.post(MessageKind.SETTINGS, encode_answered(order))

    def _wait(self, seconds: float) -> None:
        for each in self._others:
            each.wait_ready(seconds)

    def _send(self, order: Order, runner: int, rest: Sequence[int] = ()) -> None:
        parts = encode(order, runner, rest)
        for each in self._others:
            each.post(MessageKind.TURN, parts)

    def _close(self, runner: int) -> None:
        self._runners.discard(runner)
        self._send(Order.CLOSE, runner)


def rank_devices(size: int, first: torch.device) -> list[torch.device]:
    """The device of every rank.

    >>> rank_devices(2, torch.device("cpu"))
    [device(type='cpu'), device(type='cpu')]
    """
    if first.type == "cpu":
        return [first] * size
    begin, n_gpus = first.index or 0, torch.cuda.device_count()
    if begin + size > n_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {size}, from {first} on; this machine has {n_gpus} CUDA devices and each rank "
            f"needs one: use at most {n_gpus - begin}"
        )
    return [torch.device(first.type, begin + rank) for rank in range(size)]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the main thread, hold back Ctrl-C until the end of the body."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: the handler is not Python's
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


def _watch(ranks: "weakref.ref[Ranks]") -> None:
    """Wait until a rank ends by itself, or the ranks are no longer used."""
    while (those := ranks()) is not None:
        poll = select.poll()
        for life in those.lives:
            poll.register(life, select.POLLIN)
        if not those.lives:
            return
        del those
        if poll.poll(1000) and (those := ranks()) is not None and those.lives:
            those.lose()
            return
