"""A reduced head: `token_map.safetensors` beside the weights holds `ids`, the token of each row of the head."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from saguaro.errors import CorruptModel

FILE = "token_map.safetensors"


def read_token_map(folder: Path, n_vocab: int) -> Tensor | None:  # [head rows] int64
    """The map of a model folder, distinct ids below n_vocab; None if its head is whole."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            ids: Tensor = file.get_tensor("ids")
    except (SafetensorError, OSError) as e:
        raise CorruptModel(f"{path} is damaged or holds no `ids` ({e}); write the draft again") from e
    ids = ids.long().flatten()
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
        found = f"{int(ids.min())} to {int(ids.max())}" if len(ids) else "nothing"
        raise CorruptModel(f"{path} names tokens {found}; config.json knows 0 to {n_vocab - 1}")
    if len(ids.unique()) != len(ids):
        raise CorruptModel(f"{path} names a token twice; each row of the head needs a token of its own")
    return ids
