"""What a client asks of a draft service, and the limits of it.

Invariant: settings that pass cannot make the service open a file, or take more memory than a session may have.
"""

from dataclasses import replace

from saguaro.config import FALLBACKS, MAX_PAGE, MAX_STEP, VERIFICATIONS, DraftConfig
from saguaro.errors import DraftError
from saguaro.link.offer import Terms
from saguaro.method import FAN_OUTS, GROWTHS
from saguaro.methods import draft_shape

MOST_ENDS = 1024  # end-of-text tokens
MOST_LAWS = 2**31  # bytes of the distributions that tokens are drawn from, under rejection
CHOICES = {
    "growth": GROWTHS,
    "fallback": FALLBACKS[1:],
    "verification": VERIFICATIONS[1:],
    "prepare": ("always", "measured", "never"),
}


def check_asked(config: DraftConfig, terms: Terms) -> None:
    """Raise DraftError, with the reason and the remedy, unless a session may have these settings."""
    for name, known in CHOICES.items():
        _check(name, getattr(config, name), getattr(config, name) in known, f"one of {', '.join(known)}")
    most: dict[str, tuple[float, float]] = {
        "lookahead": (1, 64), "nodes": (0, 64), "width": (1, 64), "budget": (1, 256), "saguaro_c": (0, 1),
        "cut": (0, 1), "generation": (0, 2**31), "page_size": (1, MAX_PAGE), "n_step": (0, MAX_STEP),
        "n_vocab": (1, terms.n_vocab), "n_text": (config.n_vocab, 2**24), "n_tokens": (1, 2**31),
    }  # fmt: skip
    for name, (low, high) in most.items():
        _check(name, getattr(config, name), low <= getattr(config, name) <= high, f"between {low} and {high}")
    _check("read_s", config.read_s, config.read_s > 0, "more than 0")
    is_few = len(config.ends) <= MOST_ENDS and all(0 <= token < config.n_text for token in config.ends)
    _check("ends", config.ends, is_few, f"at most {MOST_ENDS} tokens of a text")
    _check_fan_out(config)
    if config.n_features:
        raise DraftError("features of the target are for a draft that reads them, and a service serves none")
    store = config.suffix_store
    _check("suffix_store", store, 0 <= store <= terms.max_tokens, f"at most {terms.max_tokens}")
    if config.max_rows > terms.max_rows:
        raise DraftError(
            f"the target decodes up to {config.max_rows} requests together, and a session here has at most "
            f"{terms.max_rows} rows; lower max_batch_rows (--max-batch-rows), or start the service with --max-rows "
            f"{config.max_rows}"
        )
    _check_memory(config, terms)


def kv_tokens(config: DraftConfig) -> int:
    """Tokens of KV memory that a draft with these settings takes: texts, and the places of trees."""
    texts = config.n_tokens + config.max_rows * 2 * (config.lookahead + 1 + config.page_size)
    return texts + _n_places(config)


def _n_places(config: DraftConfig) -> int:
    return (config.max_rows + 1) * (draft_shape(config).places + 1)


def _check_fan_out(config: DraftConfig) -> None:
    """A list has a number for each number of accepted tokens."""
    numbers = config.fan_out
    is_list = len(numbers) == config.lookahead + 1 and min(numbers) >= 0 and 1 <= sum(numbers) <= 256
    is_known = is_list if config.growth == "list" else not numbers
    _check("fan_out", numbers, is_known, f"{config.lookahead + 1} numbers with a sum up to 256, for one of {FAN_OUTS}")


def _check_memory(config: DraftConfig, terms: Terms) -> None:
    n_tokens = kv_tokens(config)
    if n_tokens > terms.max_tokens:
        raise DraftError(
            f"the target holds {config.n_tokens} tokens, for which {n_tokens} are needed here with the places of "
            f"trees, and a session has at most {terms.max_tokens}; lower kv_memory (--kv-memory) or max_batch_rows, or "
            f"start the service with --max-tokens {n_tokens}"
        )
    n_bytes = 4 * _n_places(config) * config.n_vocab if config.verification == "rejection" else 0
    if n_bytes > MOST_LAWS:
        raise DraftError(
            f"rejection keeps {n_bytes} bytes of distributions for {config.max_rows} rows, and a session has at most "
            f"{MOST_LAWS}; lower max_batch_rows (--max-batch-rows) or budget, or verify by shared noise"
        )


def _check(name: str, value: object, ok: bool, limit: str) -> None:
    if not ok:
        raise DraftError(f"{name} is {value!r}, which must be {limit}")


def as_served(config: DraftConfig, own: DraftConfig) -> DraftConfig:
    """A client's settings with the service's own paths, device and format."""
    return replace(
        config, draft=own.draft, target=own.target, tokenizer=own.tokenizer, device=own.device, dtype=own.dtype,
        learnt="", learnt_facts="{}",
    )  # fmt: skip
