"""One round (DESIGN section 2): every method is this loop with other parts.

Autoregressive decoding is the empty speculation, speculative decoding is the one for which nothing is prepared, and a
lost draft is the first of these without a path of its own. Prefill is a row with many tokens and no speculation.
"""

from saguaro.engine.scheduler import Batch, Commit, Scheduler, lookahead_limits
from saguaro.engine.verifier import Verifier
from saguaro.types import DraftLink, Outcome


class Round:
    """The target's side of the loop, and the last outcome, which the draft has not seen yet."""

    def __init__(self, scheduler: Scheduler, verifier: Verifier, draft: DraftLink) -> None:
        self.scheduler, self.verifier, self.draft = scheduler, verifier, draft
        self._outcome = Outcome.nothing()

    def play(self) -> list[Commit]:
        """Play one round; what each request got. Nothing to do gives an empty list."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        try:
            return self._play(batch)
        except BaseException:  # the draft may have missed something: introduce every row anew
            self._outcome = Outcome.nothing()
            self.scheduler.rejoin()
            raise

    def _play(self, batch: Batch) -> list[Commit]:
        self.draft.retire(batch.left)
        self.draft.admit(batch.joined)
        slots = [row.request.slot for row in batch.sampling]
        spec = self.draft.speculate(self._outcome.without(batch.left), slots).clip(lookahead_limits(batch))
        pending = self.verifier.launch(batch, spec)
        self.draft.overlap()
        self._outcome = pending.outcome()
        return self.scheduler.commit(batch, spec, self._outcome)
