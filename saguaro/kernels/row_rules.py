"""Penalties, biases and allowed tokens of a captured step's rows, as numbers: columns of a row's line, and tables.

What is counted of a text is in a table of S seats; a request keeps its seat from step to step.
"""

from typing import NamedTuple

from torch import Tensor

KINDS, SEAT, REPETITION, PRESENCE, FREQUENCY, CHANGED = range(6)  # columns; penalties as the bits of a float32
# From CHANGED on: counts that have changed since the last step, count << 32 | token, where
# count 0 is a token that is not in the text, and 1 + n one that is in it, and n times in the output.
NOTHING = -1  # in place of a count
PENALISED, BIASED, MASKED, STRICT = 1, 2, 4, 8  # kinds; STRICT: a mask holds even if it leaves no token
MOST_BIASES = 1024  # of a request
NO_BIAS = 0x7FFFFFFF << 32  # behind the last one


class Texts(NamedTuple):
    """The tokens of R left-padded rows: the nodes after each text, and the path to each node."""

    n: Tensor  # [R] int64: nodes; -1: padding row
    tokens: Tensor  # [R * (N + 1)] int64: padding, the text's last token, the nodes
    paths: Tensor | None  # [R, N, D] int64: see saguaro.algo.tree.paths_of; None: chains


class Tables(NamedTuple):
    """What does not fit into a row's line."""

    counts: Tensor  # [S, V] int16: see above
    biases: Tensor  # [S, MOST_BIASES] int64, sorted: token << 32 | bits of the float32; then NO_BIAS
    masks: Tensor  # [M, V / 32] int32: bit t % 32 of word t // 32 is 1 if token t is allowed
    which: Tensor  # [L] int32, or longer: the mask of each row of logits; -1: all tokens are allowed
