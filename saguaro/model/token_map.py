"""A reduced head: `ids` in `token_map.safetensors`, next to the weights, is the token of each row of the head."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saguaro.errors import CorruptModel
from saguaro.model.files import is_there
from saguaro.model.weights import save_tensors

FILE = "token_map.safetensors"


def read_token_map(folder: Path, n_vocab: int) -> Tensor | None:  # [head rows] int64
    """The token map of a model folder, distinct ids below n_vocab; None if it has a full head."""
    path = folder / FILE
    if not is_there(path):
        return None
    try:
        with safe_open(path, framework="pt") as file:
            ids: Tensor = file.get_tensor("ids")
    except (SafetensorError, OSError) as e:
        raise CorruptModel(f"{path} is damaged or holds no `ids` ({e}); write the draft again") from e
    if ids.dtype not in (torch.int32, torch.int64):
        raise CorruptModel(f"{path} holds `ids` of {ids.dtype}; they must be int32 or int64: write the draft again")
    ids = ids.long().flatten()
    wrong = fault(ids, n_vocab)
    if wrong is not None:
        raise CorruptModel(f"{path} {wrong}")
    return ids


def write_token_map(ids: Tensor, folder: Path) -> None:  # [head rows] int64
    """Write the token map of a model folder."""
    save_tensors({"ids": ids.int()}, folder / FILE)


def fault(ids: Tensor, n_vocab: int) -> str | None:  # [head rows] int64
    """Why these ids are not a valid token map; None if they are.

    >>> import torch
    >>> fault(torch.tensor([3, 8]), n_vocab=8)
    'names tokens 3 to 8; config.json knows 0 to 7'
    """
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
        found = f"{int(ids.min())} to {int(ids.max())}" if len(ids) else "nothing"
        return f"names tokens {found}; config.json knows 0 to {n_vocab - 1}"
    if len(ids.unique()) != len(ids):
        return "names a token twice; each row of the head needs a token of its own"
    return None
