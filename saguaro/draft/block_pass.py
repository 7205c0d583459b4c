"""One pass of a DFlash draft over blocks of several rows, and what it says of each.

    row's pages     c0 c1 c2                 keys and values of the text, from features (DraftTexts.compute)
    block           t3 m  m  m               the last token and masks, at the positions 3, 4, 5, 6
    after an outcome that is not known yet, which adds a and b:
    block           b  m  m  m               at the positions 5, 6, 7, 8; it sees c0 c1 c2, because the features of t3
                                             and a come only with the outcome

A block's keys and values lie in scratch memory until the pass is over. Every token of a block sees the row's pages and
the whole block (attention.step.Nodes).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from saguaro.algo import sampling
from saguaro.attention.step import Nodes, Step
from saguaro.draft.block import Block, Candidate
from saguaro.draft.chance import Chances
from saguaro.draft.ranking import Draws, Ranked, likeliest
from saguaro.draft.rows import DraftRow
from saguaro.draft.texts import DraftTexts
from saguaro.model.dflash import DFlash
from saguaro.target.sampler import Context, Sampler, is_plain, rules

ON_HOST = torch.device("cpu")  # where chances are: blocks become trees there
MOST_TOKENS = 128  # of a pass, or one block
DEPTHS = (1, 2, 4, 8)  # bin edges: of positions that learn their chances together
N_GROUPS = 2 * (len(DEPTHS) + 1)  # of blocks just in time, then of prepared ones


class Asked(NamedTuple):
    """A block that is wanted."""

    row: DraftRow
    after: tuple[int, ...]  # tokens after the text that are not in it yet
    n: int  # positions that are drafted

    @property
    def last(self) -> int:
        """The token that the block begins with."""
        return self.after[-1] if self.after else self.row.text[-1]

    @property
    def n_text(self) -> int:
        """Tokens before the first position that is drafted."""
        return len(self.row.text) + len(self.after)


class BlockPass:
    """Runs passes over texts that are computed."""

    def __init__(self, texts: DraftTexts, model: DFlash, sampler: Sampler, width: int, draws: Draws | None) -> None:
        """texts must have room for `scratch(model)` tokens behind the pages. width: candidates kept of a position."""
        self._texts, self._reads, self._sampler, self._draws = texts, model.reads, sampler, draws
        self.width, self._device = min(width, sampler.n_known), model.device
        self._chances = [Chances(self.width, ON_HOST) for _ in range(N_GROUPS)]

    @staticmethod
    def scratch(model: DFlash) -> int:
        """Tokens of scratch memory that a pass needs."""
        return max(MOST_TOKENS, model.reads.block_size)

    def n_positions(self, wanted: int) -> int:
        """How many positions a block has, of those wanted."""
        return min(wanted, self._reads.block_size - 1)

    @staticmethod
    def parts(asked: Sequence[Asked], most: int = MOST_TOKENS) -> Iterator[list[Asked]]:
        """These blocks in parts of so many tokens, or one block."""
        part: list[Asked] = []
        n_tokens = 0
        for each in asked:
            n_own = 1 + each.n
            if part and n_tokens + n_own > most:
                yield part
                part, n_tokens = [], 0
            part.append(each)
            n_tokens += n_own
        if part:
            yield part

    def __call__(self, asked: Sequence[Asked], fan_out: Tensor) -> list[Block]:  # [K+1]
        """The blocks, of at most MOST_TOKENS tokens or one block; fan_out: of Saguaro sampling (draft/ranking.py)."""
        step, masks = self._step(asked)
        runner = self._texts.runner
        logits = runner.logits(runner.hidden(step).index_select(0, masks))
        split = logits.split([each.n for each in asked])
        if self._draws is None and all(is_plain(each.row.request.params) for each in asked):
            return self._at_once(asked, logits)
        return self._in_turn(asked, split, fan_out)

    def block(self, asked: Asked, n_text: int, ranked: Ranked, laws: Sequence[Tensor]) -> Block:
        """What a captured pass has found for a block; n_text: as it was asked for; ranked: [n, W] each, on the host."""
        positions = self._candidates([(asked, at) for at in range(asked.n)], ranked)
        return Block(n_text, positions, laws, is_prepared=bool(asked.after))

    def learn(self, block: Block, tokens: Sequence[int]) -> None:
        """Learn what came after the text of a block: how often such candidates are right."""
        by_group: dict[int, list[tuple[list[Candidate], int]]] = {}
        for depth, (known, token) in enumerate(zip(block.positions, tokens, strict=False)):
            by_group.setdefault(_group(depth, is_prepared=block.is_prepared), []).append((known, token))
        for group, each in by_group.items():
            bins = torch.zeros(1, len(each), self.width, dtype=torch.int64)
            chosen, is_trial = bins[..., 0] - 1, bins > 0
            for at, (known, token) in enumerate(each):
                bins[0, at, : len(known)] = torch.tensor([one.bin for one in known], dtype=torch.int64)
                is_trial[0, at, : len(known)] = True
                chosen[0, at] = next((rank for rank, one in enumerate(known) if one.token == token), -1)
            self._chances[group].learn(bins, chosen, is_trial)

    def state(self) -> list[list[list[float]]]:
        """To be kept (policy/kept.py)."""
        return [each.state() for each in self._chances]

    def restore(self, state: Sequence[list[list[float]]]) -> None:
        """Continue from kept counts."""
        for each, kept in zip(self._chances, state, strict=True):
            each.restore(kept)

    def _step(self, asked: Sequence[Asked]) -> tuple[Step, Tensor]:
        """The step of these blocks, and where their masks are."""
        texts, mask = self._texts, self._reads.mask_token
        lengths = [1 + each.n for each in asked]
        starts = list(accumulate(lengths, initial=0))
        tokens = [token for each in asked for token in (each.last, *[mask] * each.n)]
        positions = [each.n_text - 1 + at for each in asked for at in range(1 + each.n)]
        masks = [end - each.n + at for each, end in zip(asked, starts[1:], strict=True) for at in range(each.n)]
        n_texts = [texts.length(each.row) - 1 for each in asked]
        pages = [texts.trunks[each.row.slot].table.pages for each in asked]
        n_pages = max(map(len, pages))
        step = Step(
            tokens=torch.tensor(tokens, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            kv_index=torch.arange(len(tokens), device=self._device) + texts.scratch,
            logits_at=torch.zeros(0, dtype=torch.int64, device=self._device),
            pages=self._whole([[*each, *[0] * (n_pages - len(each))] for each in pages]),
            starts=self._whole(starts),
            lengths=self._whole([text + n for text, n in zip(n_texts, lengths, strict=True)]),
            n_queries=max(lengths),
            longest=max(positions) + 1,
            nodes=self._nodes(n_texts, starts),
        )
        return step, torch.tensor(masks, device=self._device)

    def _nodes(self, n_texts: Sequence[int], starts: Sequence[int]) -> Nodes:
        """Every token sees its row's text and its whole block."""
        facts, first = list(zip(n_texts, starts, starts[1:], strict=False)), self._texts.scratch
        widest = max(end - start for _, start, end in facts)
        paths = [
            [*range(first + start, first + end), *[0] * (widest - (end - start))]
            for _, start, end in facts
            for _ in range(start, end)
        ]
        seen = [text + end - start for text, start, end in facts for _ in range(start, end)]
        return Nodes(texts=self._whole(n_texts), seen=self._whole(seen), paths=self._whole(paths))

    def _whole(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _at_once(self, asked: Sequence[Asked], logits: Tensor) -> list[Block]:  # [sum of n, V]
        """All positions together: no rule of these requests looks at the tokens before."""
        places = [(each, at) for each in asked for at in range(each.n)]
        contexts = [_context(each, range(at)) for each, at in places]
        found = iter(self._candidates(places, self._sampler.rank(logits, contexts, self.width)))
        return [_block(each, [next(found) for _ in range(each.n)]) for each in asked]

    def _in_turn(self, asked: Sequence[Asked], logits: Sequence[Tensor], fan_out: Tensor) -> list[Block]:
        """One position after the other, each after the first candidates of those before."""
        found: list[list[list[Candidate]]] = [[] for _ in asked]
        laws: list[list[Tensor]] = [[] for _ in asked]
        for at in range(max(each.n for each in asked)):
            here = [b for b, each in enumerate(asked) if at < each.n and all(found[b])]
            if not here:
                break
            contexts = [_context(asked[b], [known[0].token for known in found[b]]) for b in here]
            ranked, law = self._ranked(torch.stack([logits[b][at] for b in here]), contexts, fan_out, at)
            candidates = self._candidates([(asked[b], at) for b in here], ranked)
            for row, b in enumerate(here):
                found[b].append(candidates[row])
                laws[b] += [] if law is None else [law[row].cpu()]
        return [_block(each, own, law) for each, own, law in zip(asked, found, laws, strict=True)]

    def _ranked(
        self, logits: Tensor, contexts: Sequence[Context], fan_out: Tensor, at: int
    ) -> tuple[Ranked, Tensor | None]:
        if self._draws is None:
            return self._sampler.rank(logits, contexts, self.width), None
        logits, each = self._sampler.shape(logits, contexts), rules(contexts, logits.device)
        q = sampling.probabilities(logits, each)[:, : self._sampler.n_known]
        logits = logits[:, : self._sampler.n_known]
        if at >= len(fan_out) - 1:  # its candidates are bonus tokens: no draw is needed
            return likeliest(logits, self.width), None
        return self._draws(logits, q, (each.seeds, each.positions), self.width, fan_out[at : at + 1])

    def _candidates(self, places: Sequence[tuple[Asked, int]], ranked: Ranked) -> list[list[Candidate]]:
        """The tokens that may come at each of R places, with their chances; ranked: [R, W] each."""
        tokens, scores = ranked
        greedy = torch.tensor([each.row.request.params.temperature == 0 for each, _ in places])
        groups = [_group(at, is_prepared=bool(each.after)) for each, at in places]
        found: list[list[Candidate]] = [[] for _ in places]
        for group in set(groups):
            rows = [row for row, own in enumerate(groups) if own == group]
            chances, bins = self._chances[group](scores[rows].float(), greedy[rows])
            if self._draws is not None:  # a later draw never goes before an earlier one
                chances = chances.cummin(-1).values
            facts = zip(rows, tokens[rows].tolist(), chances.exp().tolist(), bins.tolist(), strict=True)
            for row, *own in facts:
                found[row] = [Candidate(*each) for each in zip(*own, strict=True) if each[1] > 0]
        return found


def _context(asked: Asked, before: Sequence[int]) -> Context:
    """The request, and the tokens before a position: of plain requests only their number matters."""
    if isinstance(before, range):
        return asked.row.request, range(len(asked.after) + len(before))
    return asked.row.request, [*asked.after, *before]


def _block(asked: Asked, positions: list[list[Candidate]], laws: Sequence[Tensor] = ()) -> Block:
    return Block(asked.n_text, positions, laws, is_prepared=bool(asked.after))


def _group(depth: int, *, is_prepared: bool) -> int:
    """Which chances a position learns with."""
    return sum(depth >= edge for edge in DEPTHS) + is_prepared * N_GROUPS // 2
