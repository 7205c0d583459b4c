"""The page pool: which page tables hold which pages of KV memory, and which pages hold reusable text.

A page holds the keys and values of `page_size` consecutive tokens of one sequence. A page is in one of three states:

    blank   in no page table, without content to keep
    cached  in no page table, but full of published text: evicted after all blank pages are used, oldest first
    held    in one or more page tables (more than one only for full, published pages)

Only full pages are published. A page is identified by the digest of its tokens and of the page before it (a hash
chain), so equal digests mean equal text from the start.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class PageTable:
    """The pages of one sequence, in order."""

    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the published pages, which come first


class PagePool:
    """A fixed number of pages, allocated to page tables."""

    def __init__(self, n_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.n_pages, self.page_size = n_pages, page_size
        self._prefix_caching = prefix_caching
        self._blank = deque(range(n_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._holders = [0] * n_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def n_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._blank) + len(self._cached)

    def n_needed(self, n_tokens: int) -> int:
        """Pages needed for this number of tokens."""
        return -(-n_tokens // self.page_size)

    def match(self, tokens: Sequence[int]) -> tuple[PageTable, int]:
        """A new table with the longest published prefix of this text, and its length in tokens.

        The last token is never matched: at least one token must be computed.
        """
        table = PageTable()
        if not self._prefix_caching:
            return table, 0
        for index in range((len(tokens) - 1) // self.page_size):
            digest = self._digest(table, tokens, index)
            page = self._page_of.get(digest)
            if page is None:
                break
            self._cached.pop(page, None)
            self._holders[page] += 1
            table.pages.append(page)
            table.digests.append(digest)
        return table, len(table.pages) * self.page_size

    def reserve(self, table: PageTable, n_tokens: int) -> bool:
        """Extend the table to n_tokens in total. False, without any change, if there are not enough pages."""
        n_more = self.n_needed(n_tokens) - len(table.pages)
        if n_more > self.n_free:
            return False
        table.pages.extend(self._take() for _ in range(n_more))
        return True

    def publish(self, table: PageTable, tokens: Sequence[int], n_computed: int) -> None:
        """Put the table's pages that are full of computed tokens into the prefix cache."""
        if not self._prefix_caching:
            return
        for index in range(len(table.digests), n_computed // self.page_size):
            digest, page = self._digest(table, tokens, index), table.pages[index]
            if digest not in self._page_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest
            table.digests.append(digest)

    def trim(self, table: PageTable, n_tokens: int) -> None:
        """Free the pages beyond n_tokens."""
        n_kept = self.n_needed(n_tokens)
        self._give_back(reversed(table.pages[n_kept:]))
        del table.pages[n_kept:]
        del table.digests[n_kept:]

    def release(self, table: PageTable) -> None:
        """Free all pages of the table."""
        self.trim(table, 0)

    def check(self, tables: Iterable[PageTable]) -> None:
        """Raise AssertionError unless the pool is consistent with all tables in use."""
        held = [0] * self.n_pages
        for table in tables:
            assert len(set(table.pages)) == len(table.pages), "a table holds a page twice"
            assert len(table.digests) <= len(table.pages), "a table knows digests of pages it does not hold"
            for page in table.pages:
                held[page] += 1
        assert held == self._holders, "the holders counted and the holders found differ"
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a page is free twice"
        assert set(free) == {page for page, n in enumerate(held) if n == 0}, "a page is lost, or free while held"
        assert all(self._page_of[digest] == page for page, digest in self._digest_of.items()), "digests disagree"
        assert len(self._page_of) == len(self._digest_of), "a digest leads to a page that does not know it"
        assert all(page in self._digest_of for page in self._cached), "a cached page holds nothing known"
        assert not any(page in self._digest_of for page in self._blank), "a blank page is still published"
        for page, n in enumerate(held):
            assert n <= 1 or page in self._digest_of, "an unpublished page is shared"

    def _take(self) -> int:
        if self._blank:
            page = self._blank.popleft()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._holders[page] = 1
        return page

    def _give_back(self, pages: Iterable[int]) -> None:
        # Last page first, so that the beginning of a text, which more texts share, is evicted last.
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._blank.append(page)

    def _digest(self, table: PageTable, tokens: Sequence[int], index: int) -> bytes:
        before = table.digests[index - 1] if index else b""
        page = array("q", tokens[index * self.page_size : (index + 1) * self.page_size])
        return hashlib.blake2b(before + page.tobytes(), digest_size=16).digest()
