"""A verifier with CPU affinity, for a draft that has its own cores."""

from saguaro.device.affinity import Affinity
from saguaro.target.scheduler import Batch
from saguaro.target.verifier import Pending, Verifier
from saguaro.types import Speculation

LONG = 48  # steps of at least this many tokens use all cores: they read prompts, and the draft has little to do


class PinnedVerifier:
    """Runs short steps on the target's cores and long ones on all cores. The results are the same."""

    runs_ahead = False

    def __init__(self, verifier: Verifier, beside: Affinity, everywhere: Affinity) -> None:
        assert not verifier.runs_ahead, "a device has its own places"
        self._verifier, self._beside, self._everywhere = verifier, beside, everywhere

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """See Verifier."""
        n_tokens = sum(row.n_tokens for row in batch.rows)
        with self._everywhere if n_tokens >= LONG else self._beside:
            return self._verifier.launch(batch, spec)
