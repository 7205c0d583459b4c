"""The draft model of a service: loaded once, and the draft side of every session built around it.

Invariant: weights are shared and never change; everything else belongs to a session.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from saguaro.config import DraftConfig, Structured
from saguaro.draft.load import load_draft
from saguaro.errors import ConfigError, DraftError
from saguaro.link.answer import Side
from saguaro.link.asked import as_served, check_asked, kv_tokens
from saguaro.link.offer import Offer, TargetShape, Terms, sums_of
from saguaro.methods import warm_side
from saguaro.model.feature_config import reads_features
from saguaro.model.grammar import Grammars
from saguaro.model.load import borrows, locate, spec_of
from saguaro.model.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.target.grammar import Grammar


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a draft is read from, and how."""

    draft: str  # as a draft is named: a folder, a .gguf file, a Hub id, or drop:I,J,...
    target: Path | None = None  # of a draft that uses its target's weights
    device: torch.device
    dtype: str


@dataclass(frozen=True)
class ServedModel:
    """A loaded draft."""

    own: DraftConfig  # the service's own paths, device and format
    model: Transformer
    tokenizer: Tokenizer | None
    terms: Terms

    @property
    def offer(self) -> Offer:
        """What clients are told."""
        spelling: Mapping[int, str] = {} if self.tokenizer is None else self.tokenizer.spelling
        return Offer(self.terms, sums_of(spelling))

    def build(self, config: DraftConfig) -> tuple[Side, int]:
        """The draft side of a session with these settings, and its KV tokens. Raises DraftError if it may not have
        them, or there is no memory."""
        check_asked(config, self.terms)
        device = self.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a session has a thread of its own
        tokenizer = self.tokenizer
        grammars = None if tokenizer is None else Grammars(lambda: tokenizer, config.n_vocab, config.ends)
        try:
            side = warm_side(as_served(config, self.own), self.model, partial(_start, grammars))
        except RuntimeError as e:  # torch's out-of-memory errors, on any device
            raise DraftError(
                f"the memory of its {device.type} does not suffice for another session ({str(e).splitlines()[0]}); end "
                "one, or start it with fewer --max-sessions or --max-tokens"
            ) from e
        return side, kv_tokens(config)


def load_served(source: Source, *, max_rows: int, max_tokens: int) -> ServedModel:
    """Load the draft of a service."""
    is_part = source.draft.startswith("drop:")
    path = Path(source.draft) if is_part else locate(source.draft)
    kind = None if is_part else reads_features(path)
    if kind is not None:
        raise ConfigError(
            f"{path} is a draft of kind {kind}: it reads features of its target, which would have to travel with every "
            "token, and files of the target say which; run it beside the target with --draft and --link process"
        )
    uses_target = is_part or borrows(path)
    if uses_target and source.target is None:
        raise ConfigError(
            f"the draft {source.draft} uses weights of its target; pass the target's files on this machine: --target"
        )
    words = next((each for each in (path, source.target) if each is not None and has_tokenizer(each)), None)
    own = DraftConfig(
        draft=str(path), target=str(source.target or path), tokenizer=str(words or path), growth="nothing",
        fallback="draft", verification="shared", lookahead=1, budget=1, n_vocab=1, n_text=1, max_rows=1, n_tokens=1,
        page_size=1, device=str(source.device), dtype=source.dtype,
    )  # fmt: skip
    model = load_draft(own, None)
    tokenizer = None if words is None else load_tokenizer(words, model.spec.n_vocab)
    shape = None
    if uses_target and source.target is not None:
        spec = spec_of(source.target)
        shape = TargetShape(spec.n_layers, spec.hidden, spec.n_vocab)
    name = source.draft if is_part else path.name
    return ServedModel(own, model, tokenizer, Terms(name, model.spec.n_vocab, max_rows, max_tokens, shape))


def _start(grammars: Grammars | None, structured: Structured) -> Grammar | None:
    """The grammar of a row; None if the service's tokenizer cannot follow it: proposals need not satisfy it."""
    try:
        return None if grammars is None else grammars.start(structured)
    except ConfigError:
        return None
