"""Several draft services for one target: rows are shared out, and any of them may be late or die."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import torch

from saguaro.link.address import Address, listen
from saguaro.link.service import Service
from saguaro.link.several import Several, merged
from saguaro.types import CACHE, DRAFT, EMPTY, SCRIPT, DraftTimes, Speculation
from tests.link.echo import propose
from tests.link.service import ServiceProcess, connect, served, serving
from tests.link.target import AGES, ROWS, K, Target, until


class Sharing(Target):
    """A target of which every row may be without a speculation, or has the right one."""

    n_rows = 0  # that had one, in the last round

    def _check(self, spec: Speculation, slots: list[int], room: list[int]) -> None:
        columns = (spec.length.tolist(), spec.source.tolist(), spec.tokens.tolist())
        self.n_rows = 0
        for slot, n, length, source, tokens in zip(slots, room, *columns, strict=True):
            if length:
                assert tokens[:length] == propose(self.rows[slot], self.texts[slot], min(n, K), self.n_vocab)
                self.n_rows += 1
            assert source == (SCRIPT if length else EMPTY)
        self.n_spoken += self.n_rows > 0


@contextlib.contextmanager
def several(*processes: ServiceProcess) -> Iterator[tuple[Several, Sharing]]:
    """A link to all of them, and a target that has heard from each."""
    with contextlib.closing(Several([connect(each.address) for each in processes])) as link:
        link.wait_ready(AGES)
        target = Sharing(link)
        target.play_until(lambda: target.n_spoken > 10)
        assert set(link._owners.values()) == set(range(len(processes)))
        yield link, target


def goes_on(target: Sharing, n: int = 5) -> None:
    """Rows have speculations."""
    spoken = target.n_spoken
    target.play_until(lambda: target.n_spoken > spoken + n)


def test_rows_come_and_go_and_every_row_has_its_speculation() -> None:
    with contextlib.ExitStack() as stack:
        link = Several([connect(stack.enter_context(serving())[1]) for _ in range(3)])
        stack.enter_context(contextlib.closing(link))
        link.wait_ready(AGES)
        target, n_asked = Target(link), 0
        for _ in range(200):
            n_asked += len(target.play().length) > 0
        assert target.n_spoken == n_asked > 100
        assert (target.n_fresh, link.n_starts, link.n_deaths, link.n_late) == (1, 1, 0, 0)


def test_all_rest_together_and_wake_together() -> None:
    with contextlib.ExitStack() as stack:
        link = Several([connect(stack.enter_context(serving())[1]) for _ in range(2)])
        stack.enter_context(contextlib.closing(link))
        link.wait_ready(AGES)
        assert link.n_ready == 2
        target = Target(link)
        target.play_until(lambda: link.was_asked)
        link.rest()
        spoken = target.n_spoken
        for _ in range(20):
            target.play()
            assert not link.was_asked
        assert target.n_spoken == spoken
        link.wake()
        target.play_until(lambda: target.n_spoken > spoken + 10)
        assert (target.n_fresh, link.n_deaths, link.n_late) == (2, 0, 0)


def test_any_draft_may_be_late_or_die() -> None:
    with ServiceProcess() as first, ServiceProcess() as second, several(first, second) as (link, target):
        one_is_late(link, target, second)
        one_dies(link, target, second)
        with second.again() as third:
            target.play_until(lambda: link._usable == {0, 1})
            target.play_until(lambda: len(target.rows) == ROWS and len(link._owners) == ROWS)
            assert set(link._owners.values()) == {0, 1}
            goes_on(target)
            assert (link.links[0].n_deaths, link.n_late) == (0, 1)
            assert link.n_starts == link.links[1].n_starts > 1
            for one in (first, third):
                one.kill()
            target.play_until(lambda: link.links[0].n_deaths > 0)
            assert target.play().length.sum() == 0
            with serving_at(first.address):
                goes_on(target)
                assert set(link._owners.values()) == {0}


def one_is_late(link: Several, target: Sharing, process: ServiceProcess) -> None:
    """It costs its own rows one round, then the others have them."""
    os.kill(process.popen.pid, signal.SIGSTOP)
    link.links[1].timeout = 0.2
    target.play_until(lambda: link.n_late == 1)
    link.links[1].timeout = AGES
    goes_on(target)
    assert set(link._owners.values()) == {0}
    os.kill(process.popen.pid, signal.SIGCONT)
    target.play_until(lambda: link._usable == {0, 1})
    goes_on(target)
    assert (link.n_late, link.n_deaths) == (1, 0)


def one_dies(link: Several, target: Sharing, process: ServiceProcess) -> None:
    """The others have its rows."""
    process.kill()
    target.play_until(lambda: link._usable == {0})
    goes_on(target)
    assert set(link._owners.values()) == {0}


@contextlib.contextmanager
def serving_at(address: Address) -> Iterator[None]:
    """A service in a thread, at an address that another had."""
    service = Service(listen(address, is_keyed=True), served())
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield
    finally:
        service.stop()
        thread.join()


def test_no_draft_keeps_rows_that_another_has() -> None:
    with contextlib.ExitStack() as stack:
        hosts, addresses = zip(*(stack.enter_context(serving()) for _ in range(2)), strict=True)
        link = Several([connect(each) for each in addresses])
        stack.enter_context(contextlib.closing(link))
        link.wait_ready(AGES)
        target = Sharing(link)
        goes_on(target)
        for round_ in range(4):
            peer = link.links[round_ % 2]._peer
            assert peer is not None
            peer.close()
            target.play_until(lambda: len(link._usable) == 1)
            target.play_until(lambda: len(link._usable) == 2)
            goes_on(target, 20)
            until(lambda: all(len(host.sessions) == 1 for host in hosts))
            held = [each.counts.slots for host in hosts for each in host.sessions]
            assert not held[0] & held[1], "a row has one draft"


def test_speculations_of_all_kinds_are_merged() -> None:
    tree = Speculation.of([[1, 2, 3]], 3, [CACHE], [[-1, -1, 0]])
    chains = Speculation.of([[4, 5], []], 2, [DRAFT, DRAFT])
    q = torch.rand(2, 2, 9)
    chains = Speculation(chains.tokens, chains.length, chains.source, q, DraftTimes((3.0, 4.0), (1.0, 2.0), False))
    tree = Speculation(tree.tokens, tree.length, tree.source, None, DraftTimes((2.0, 5.0), (0.0, 1.5)), tree.parent)
    both = merged([(chains, [2, 0]), (tree, [1]), (Speculation.empty(0), [])], 4)
    assert both.tokens.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 0], [0, 0, 0]]
    assert (both.length.tolist(), both.source.tolist()) == ([0, 3, 2, 0], [EMPTY, CACHE, DRAFT, EMPTY])
    assert both.parents() == [[], [-1, -1, 0], [-1, 0], []]
    assert both.q is not None
    assert torch.equal(both.q[[2, 0]], q)
    assert both.q[[1, 3]].sum() == 0
    assert both.times == DraftTimes((2.0, 5.0), (0.0, 2.0), True)
    assert merged([], 2).length.tolist() == [0, 0]
