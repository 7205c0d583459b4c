"""How the draft's side is built in tests: small, and only what a test is about is said."""

from typing import Any

from saguaro.config import DraftConfig


def new_config(n_vocab: int, **others: Any) -> DraftConfig:
    """A model that drafts just in time under shared noise, for a few rows of short texts; others replace any of it."""
    usual: dict[str, Any] = {
        "draft": "draft",
        "target": "target",
        "tokenizer": others.get("target", "target"),
        "growth": "nothing",
        "fallback": "draft",
        "verification": "shared",
        "lookahead": 4,
        "budget": 2,
        "n_text": n_vocab,
        "max_rows": 8,
        "n_tokens": 512,
        "page_size": 4,
    }
    return DraftConfig(n_vocab=n_vocab, **(usual | others))
