"""A verifier whose steps run on the cores they should, where the draft has cores of its own."""

from saguaro.device.affinity import Affinity
from saguaro.target.scheduler import Batch
from saguaro.target.verifier import Pending, Verifier
from saguaro.types import Speculation

LONG = 48  # tokens of a step that takes every core: reading a prompt, beside which the draft has little to do


class PinnedVerifier:
    """Steps of few tokens beside the draft, longer ones on every core; what they give is the same."""

    runs_ahead = False

    def __init__(self, verifier: Verifier, beside: Affinity, everywhere: Affinity) -> None:
        assert not verifier.runs_ahead, "a device has its own places"
        self._verifier, self._beside, self._everywhere = verifier, beside, everywhere

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """See Verifier."""
        n_tokens = sum(row.n_tokens for row in batch.rows)
        with self._everywhere if n_tokens >= LONG else self._beside:
            return self._verifier.launch(batch, spec)
