"""Every row's text as the draft knows it: from admissions and outcomes alone, for the target's side is elsewhere."""

from collections.abc import Mapping, Sequence

from saguaro.types import Joined, Outcome, Speculation


class Texts:
    """Texts by slot, and what was last proposed for each, without which an outcome means nothing."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._proposed: dict[int, list[int]] = {}

    def __getitem__(self, slot: int) -> list[int]:
        """The text of a row."""
        return self._texts[slot]

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these texts."""
        for row in rows:
            assert row.slot not in self._texts, f"slot {row.slot} was admitted twice"
            self._texts[row.slot] = list(row.tokens)
            self._proposed[row.slot] = []

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these texts, those that are known."""
        for slot in slots:
            self._texts.pop(slot, None)
            self._proposed.pop(slot, None)

    def propose(self, proposed: Mapping[int, list[int]], lookahead: int) -> Speculation:
        """Remember what is proposed after each row's text, and make it a speculation in that order."""
        self._proposed.update(proposed)
        return Speculation.of(list(proposed.values()), lookahead)

    def commit(self, outcome: Outcome) -> None:
        """Append what the target accepted and put."""
        triples = zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), outcome.bonus.tolist(), strict=True)
        for slot, n_accepted, bonus in triples:
            self._texts[slot] += [*self._proposed[slot][:n_accepted], bonus]
            self._proposed[slot] = []
