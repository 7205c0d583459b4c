"""The page pool: its books balance, and a page found again holds the text it is said to hold."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saguaro.kv.pages import PagePool, PageTable

TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=12)  # two letters: beginnings really collide
ANY = st.integers(0, 10**6)


class Sequence:
    """A text, the pages it has, and how much of it is computed."""

    def __init__(self, text: list[int], table: PageTable, n_computed: int) -> None:
        self.text, self.table, self.n_computed = text, table, n_computed


class PoolMachine(RuleBasedStateMachine):
    """Sequences that come, grow, speculate and go.

    `content` models the memory: a slot holds the whole text up to it, since keys and values depend on all of it.
    """

    @initialize(n_pages=st.integers(2, 9), page_size=st.integers(1, 4), caching=st.sampled_from([True, True, False]))
    def build(self, n_pages: int, page_size: int, caching: bool) -> None:
        self.pool = PagePool(n_pages, page_size, caching)
        self.caching = caching
        self.sequences: list[Sequence] = []
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, offset) -> text up to there

    @rule(text=TEXT)
    def match(self, text: list[int]) -> None:
        table, n_matched = self.pool.match(text)
        assert n_matched == len(table.pages) * self.pool.page_size
        assert n_matched < len(text), "nothing is left to compute"
        assert self.caching or n_matched == 0
        self.sequences.append(Sequence(list(text), table, n_matched))

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, n_tokens=st.integers(1, 8), speculated=st.lists(st.integers(0, 1), max_size=4))
    def compute(self, which: int, n_tokens: int, speculated: list[int]) -> None:
        """A step: room, then keys and values of text and speculation, then publication of what is full."""
        sequence = self.sequences[which % len(self.sequences)]
        end = min(sequence.n_computed + n_tokens, len(sequence.text))
        before = copy.deepcopy(self.pool.__dict__), copy.deepcopy(sequence.table)
        wanted = self.pool.n_needed(end + len(speculated)) - len(sequence.table.pages)
        is_room = self.pool.reserve(sequence.table, end + len(speculated))
        assert is_room == (wanted <= len(before[0]["_blank"]) + len(before[0]["_cached"]))
        if not is_room:
            assert (self.pool.__dict__, sequence.table) == before, "a refused reservation changed something"
            return
        self.write(sequence, [*sequence.text[:end], *speculated])
        sequence.n_computed = end
        self.pool.publish(sequence.table, sequence.text, end)

    def write(self, sequence: Sequence, text: list[int]) -> None:
        others = {page for s in self.sequences if s is not sequence for page in s.table.pages}
        for at in range(sequence.n_computed, len(text)):
            page = sequence.table.pages[at // self.pool.page_size]
            assert page not in others, "a shared page was written"
            self.content[page, at % self.pool.page_size] = tuple(text[: at + 1])

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, more=TEXT)
    def grow(self, which: int, more: list[int]) -> None:
        self.sequences[which % len(self.sequences)].text.extend(more)

    @precondition(lambda self: self.sequences)
    @rule(which=ANY)
    def trim(self, which: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        self.pool.trim(sequence.table, sequence.n_computed)
        assert len(sequence.table.pages) == self.pool.n_needed(sequence.n_computed)

    @precondition(lambda self: self.sequences)
    @rule(which=ANY)
    def release(self, which: int) -> None:
        sequence = self.sequences.pop(which % len(self.sequences))
        self.pool.release(sequence.table)
        assert sequence.table == PageTable()

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, cut=st.integers(0, 3))
    def match_again(self, which: int, cut: int) -> None:
        """Somebody sends a text that is known, or nearly."""
        text = self.sequences[which % len(self.sequences)].text
        self.match([*text[: max(1, len(text) - cut)], 1])

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check(sequence.table for sequence in self.sequences)

    @invariant()
    def computed_pages_hold_their_text(self) -> None:
        for sequence in self.sequences:
            for at in range(sequence.n_computed):
                slot = (sequence.table.pages[at // self.pool.page_size], at % self.pool.page_size)
                assert self.content[slot] == tuple(sequence.text[: at + 1])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def computed(pool: PagePool, text: list[int], n_computed: int | None = None) -> PageTable:
    """A table that went through the life of one sequence up to publication."""
    table, _ = pool.match(text)
    assert pool.reserve(table, len(text))
    pool.publish(table, text, len(text) if n_computed is None else n_computed)
    return table


def n_matched(pool: PagePool, text: list[int]) -> int:
    """How much of a text would be found, without keeping it."""
    table, n = pool.match(text)
    pool.release(table)
    return n


def test_a_known_text_is_found_whole_pages_only() -> None:
    pool = PagePool(n_pages=8, page_size=4)
    table = computed(pool, list(range(11)))
    found, n = pool.match(list(range(11)))
    assert (found.pages, n) == (table.pages[:2], 8)
    pool.check([table, found])


def test_a_prompt_wholly_cached_leaves_a_token_to_compute() -> None:
    pool = PagePool(n_pages=8, page_size=4)
    pool.release(computed(pool, list(range(8))))
    assert n_matched(pool, list(range(8))) == 4
    assert n_matched(pool, list(range(9))) == 8


def test_a_partial_page_is_never_published() -> None:
    pool = PagePool(n_pages=8, page_size=4)
    text = list(range(12))
    table = computed(pool, text, n_computed=7)
    assert n_matched(pool, text) == 4
    pool.publish(table, text, n_computed=8)
    assert n_matched(pool, text) == 8


def test_reserve_is_all_or_nothing() -> None:
    pool = PagePool(n_pages=4, page_size=2)
    table, other = PageTable(), PageTable()
    assert pool.reserve(other, 2)
    assert not pool.reserve(table, 8)
    assert table.pages == []
    assert pool.n_free == 3
    assert pool.reserve(table, 6)
    assert pool.n_free == 0
    pool.check([table, other])


def test_reserving_room_that_is_there_changes_nothing() -> None:
    pool = PagePool(n_pages=4, page_size=2)
    table = PageTable()
    assert pool.reserve(table, 6)
    pages = list(table.pages)
    assert pool.reserve(table, 3)
    assert pool.reserve(table, 6)
    assert table.pages == pages


def test_texts_equal_in_their_second_page_alone_do_not_share() -> None:
    pool = PagePool(n_pages=8, page_size=2)
    computed(pool, [1, 1, 7, 7, 0])
    assert n_matched(pool, [2, 2, 7, 7, 0]) == 0
    computed(pool, [2, 2, 7, 7, 0])
    assert n_matched(pool, [1, 1, 7, 7, 0]) == 4


def test_without_prefix_caching_nothing_is_shared() -> None:
    pool = PagePool(n_pages=8, page_size=2, prefix_caching=False)
    text = [1, 2, 3, 4, 5]
    table = computed(pool, text)
    assert pool.match(text) == (PageTable(), 0)
    pool.release(table)
    assert pool.match(text) == (PageTable(), 0)
    pool.check([])


def test_two_who_computed_the_same_text_keep_their_own_pages() -> None:
    pool = PagePool(n_pages=8, page_size=2)
    text = [1, 2, 3]
    first, second = PageTable(), PageTable()
    for table in (first, second):
        assert pool.reserve(table, 3)
    for table in (first, second):
        pool.publish(table, text, 3)
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    assert n_matched(pool, text) == 2


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    pool = PagePool(n_pages=4, page_size=2)
    text = list(range(9))
    pool.release(computed(pool, text[:8]))
    for n_left in (6, 4, 2, 0):
        assert pool.n_free == 4
        taken = PageTable()
        assert pool.reserve(taken, 8 - n_left)  # as many pages as must go
        pool.release(taken)
        assert n_matched(pool, text) == n_left
    pool.check([])


def test_the_text_unused_for_longest_is_evicted_first() -> None:
    pool = PagePool(n_pages=4, page_size=2)
    old, new = [1, 1, 1, 1], [2, 2, 2, 2]
    for text in (old, new):
        pool.release(computed(pool, text))
    assert n_matched(pool, [*old, 0]) == 4  # used once more: now the newer one
    taken = PageTable()
    assert pool.reserve(taken, 4)
    assert (n_matched(pool, [*old, 0]), n_matched(pool, [*new, 0])) == (4, 0)


def test_blank_pages_are_taken_before_known_text_is_forgotten() -> None:
    pool = PagePool(n_pages=4, page_size=2)
    text = [1, 2, 3, 4]
    pool.release(computed(pool, text))
    taken = PageTable()
    assert pool.reserve(taken, 4)
    assert n_matched(pool, [*text, 5]) == 4


def test_an_evicted_page_is_forgotten() -> None:
    pool = PagePool(n_pages=2, page_size=2)
    pool.release(computed(pool, [1, 1, 1, 1]))
    table = computed(pool, [2, 2, 2, 2])
    assert n_matched(pool, [1, 1, 1, 1]) == 0
    pool.release(table)
    assert n_matched(pool, [2, 2, 2, 2, 2]) == 4
