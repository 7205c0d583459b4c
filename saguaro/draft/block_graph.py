"""Passes of a block draft that a GPU captures: a fixed number of blocks, each with the same number of masks.

The host writes one line of numbers per block, and a graph runs for some of them at a time. What they find is fetched
without waiting, and read block by block when the host needs it: the one that was prepared for an outcome, say.

    host      write lines 0..n, launch                                         ... wait, read some
    device                      | pass of 0..b | pass of b..2b | ... | fetch |
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from saguaro.algo import sampling
from saguaro.attention.step import Nodes, Step
from saguaro.device.graphs import BUCKETS, Graphs, Mirror, Moment, as_float, bucket, float_bits
from saguaro.draft.block_pass import MOST_TOKENS, Asked
from saguaro.draft.ranking import Draws, Ranked, likeliest
from saguaro.draft.texts import DraftTexts
from saguaro.kernels.bundle import Kernels
from saguaro.kv.tables import PageTables
from saguaro.model.dflash import DFlash

# Columns of a block's line: its row, the places of the text that it sees, the position and id of the token that it
# begins with, and the request's noise.
SLOT, SEEN, POSITION, TOKEN, SEED, TEMPERATURE = range(6)
N_COLUMNS = 6


class CapturedPass:
    """Runs captured passes over texts that are computed."""

    def __init__(
        self,
        texts: DraftTexts,
        model: DFlash,
        graphs: Graphs,
        kernels: Kernels,
        draws: Draws | None,
        *,
        n: int,  # masks of a block
        width: int,  # candidates kept of a position
        n_known: int,
        max_rows: int,
        most: int,  # most blocks of a call
    ) -> None:
        self._texts, self._mask, self._graphs = texts, model.reads.mask_token, graphs
        self._kernels, self._draws = kernels, draws
        self._n, self._width, self._n_known, self._device = n, width, n_known, model.device
        self.sizes = [size for size in BUCKETS if size == 1 or size * (1 + n) <= MOST_TOKENS]
        self._tables = PageTables(max_rows, texts.longest, texts.cache.page_size, self._device)
        most, at_once = max(bucket(most), self.sizes[-1]), self.sizes[-1]
        self._lines = Mirror((most, N_COLUMNS), torch.int64, self._device)
        self._found = Mirror((most, 2 * n * width), torch.int64, self._device)  # tokens, then bits of scores
        self._given = torch.zeros(at_once, N_COLUMNS, dtype=torch.int64, device=self._device)  # of one pass
        self._said = torch.zeros(at_once, 2 * n * width, dtype=torch.int64, device=self._device)
        # What positions were drawn from [blocks, drawn, V], of one pass and of all blocks of a call. They are allocated
        # by the first pass that draws, before it is captured.
        self._laws, self._kept = torch.empty(0), torch.empty(0)
        self._host, self._sent, self._done = self._lines.host.numpy(), Moment(self._device), Moment(self._device)

    def warm(self, fan_out: Callable[[], Tensor], kind: str) -> None:
        """Capture the passes of this kind, of padding."""
        for size in reversed(self.sizes):
            self._write([], size)
            self._launch(0, size, fan_out, kind)

    def __call__(self, asked: Sequence[Asked], fan_out: Callable[[], Tensor], kind: str) -> None:
        """Launch the passes of these blocks, which replace those of the call before. fan_out [K+1]: of Saguaro sampling
        (draft/ranking.py), computed within the captured function; kind: which fan-out it is."""
        self._write(asked, -(-len(asked) // self.sizes[-1]) * self.sizes[-1])
        for first in range(0, len(asked), self.sizes[-1]):
            n = min(self.sizes[-1], len(asked) - first)
            self._launch(first, bucket(n), fan_out, kind)
        self._found.fetch(len(asked))
        self._done.mark()

    def ranked(self, at: int) -> tuple[Ranked, list[Tensor]]:  # [n, W] twice, and [V] of each position that was drawn
        """What was found for a block of the call, by its number: candidates and scores, and what they were drawn from.
        Waits until it is there."""
        self._done.wait()
        tokens, bits = self._found.host[at].view(2, self._n, self._width)
        laws = list(self._kept[at].cpu()) if self._draws is not None else []
        return (tokens, as_float(bits)), laws

    def _write(self, asked: Sequence[Asked], n_lines: int) -> None:
        """Write the lines of these blocks, with padding."""
        self._sent.wait()
        self._tables.write((each.row.slot, self._texts.trunks[each.row.slot].table.pages) for each in asked)
        padding = [self._tables.padding_slot, *[0] * (N_COLUMNS - 1)]
        self._host[:n_lines] = [self._line(each) for each in asked] + [padding] * (n_lines - len(asked))
        self._lines.send(n_lines)
        self._sent.mark()

    def _line(self, asked: Asked) -> list[int]:
        request = asked.row.request
        noise = [request.seed, float_bits(request.params.temperature)]
        return [asked.row.slot, self._texts.length(asked.row) - 1, asked.n_text - 1, asked.last, *noise]

    def _launch(self, first: int, size: int, fan_out: Callable[[], Tensor], kind: str) -> None:
        """Run one pass, of the lines from `first` on."""
        here = slice(first, first + size)
        self._given[:size] = self._lines.device[here]
        self._graphs.run(("blocks", kind, size), partial(self._pass, size, fan_out))
        self._found.device[here] = self._said[:size]
        if self._draws is not None:
            self._kept[here] = self._laws[:size]

    def _pass(self, size: int, fan_out: Callable[[], Tensor]) -> None:
        lines, n = self._given[:size], self._n
        runner = self._texts.runner
        hidden = runner.hidden(self._step(lines)).view(size, 1 + n, -1)[:, 1:].flatten(0, 1)
        logits = runner.logits(hidden)
        temperature, seeds = as_float(lines[:, TEMPERATURE]), lines[:, SEED].contiguous()
        positions = lines[:, POSITION, None] + torch.arange(1, 1 + n, device=self._device)  # [B, n]
        if self._draws is None:
            noise = temperature, seeds, positions.flatten()
            tokens, scores = self._kernels.rank(logits, *noise, self._n_known, self._width)
        else:
            tokens, scores = self._drawn(self._draws, size, logits, (temperature, seeds, positions), fan_out())
        bits = scores.float().contiguous().view(torch.int32).long()
        self._said[:size] = torch.cat((tokens.reshape(size, -1), bits.view(size, -1)), 1)

    def _step(self, lines: Tensor) -> Step:
        """Every token sees its row's text and its whole block, whose keys and values are in scratch memory."""
        texts, device = self._texts, self._device
        size, width = len(lines), 1 + self._n
        column = torch.arange(width, device=device)
        tokens = torch.where(column == 0, lines[:, TOKEN, None], self._mask)
        kv_index = (texts.scratch + torch.arange(size * width, device=device)).view(size, width)
        seen = lines[:, SEEN]
        nodes = Nodes(
            texts=seen.int(),
            seen=(seen + width).int().repeat_interleave(width, output_size=size * width),
            paths=kv_index.int().repeat_interleave(width, dim=0, output_size=size * width),
        )
        starts = torch.arange(size + 1, dtype=torch.int32, device=device) * width
        return Step(
            tokens.flatten(), (lines[:, POSITION, None] + column).flatten(), kv_index.flatten(), starts[:0].long(),
            self._tables.device[lines[:, SLOT]], starts, (seen + width).int(), width, texts.longest, nodes,
        )  # fmt: skip

    def _drawn(
        self, draws: Draws, size: int, logits: Tensor, noise: tuple[Tensor, Tensor, Tensor], fan_out: Tensor
    ) -> Ranked:
        """Draws of every position but the last, whose candidates are bonus tokens."""
        by_position = logits[:, : self._n_known].view(size, self._n, -1).unbind(1)
        temperature, seeds, positions = noise  # [size], [size], [size, n]
        found: list[Ranked] = []
        laws: list[Tensor] = []
        for at, own in enumerate(by_position):
            if at >= len(fan_out) - 1:
                found.append(likeliest(own, self._width))
                continue
            q = sampling.at_temperature(own.contiguous(), temperature)
            ranked, law = draws(own, q, (seeds, positions[:, at].contiguous()), self._width, fan_out[at : at + 1])
            found.append(ranked)
            laws.append(law)
        if not self._laws.numel():
            each = len(laws), self._n_known
            self._laws = laws[0].new_empty(len(self._said), *each)
            self._kept = laws[0].new_empty(len(self._lines.host), *each)
        self._laws[:size] = torch.stack(laws, 1)
        tokens, scores = zip(*found, strict=True)
        return torch.stack(tokens, 1), torch.stack(scores, 1)
