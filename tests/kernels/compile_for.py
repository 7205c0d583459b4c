"""Compile our kernels for a GPU that need not be there.

python -m tests.kernels.compile_for 89|90|gfx942        # of NVIDIA by compute capability, of AMD by name

Kernels are launched as ever, with tensors that hold nothing; in place of a launch they are compiled. A line for each:
its file and name, and the bytes of shared memory it takes.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
LIMITS = {"89": 99 * 1024, "90": 227 * 1024, "gfx942": 64 * 1024}  # bytes of shared memory that a program may have
META = torch.device("meta")
# D, H, H_kv, d, MLP, V, norms of heads: Qwen3-0.6B, SmolLM2-135M, and a 32B model with 8 heads for each key head
SHAPES = [
    (1024, 16, 8, 128, 3072, 151936, True),
    (576, 9, 3, 64, 1536, 49152, False),
    (5120, 64, 8, 128, 25600, 151936, True),
]


def main(name: str) -> None:
    """Compile for this GPU."""
    if name.startswith("gfx"):
        torch.version.hip = "6.4"  # before our modules look
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from saguaro.kernels import launch, linear

    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name), 32)
    linear._shared_bytes = lambda device: min(linear.SHARED_BYTES, LIMITS[name])  # type: ignore[assignment]
    launch._can_start_early = lambda device: name == "90"  # type: ignore[assignment]
    seen: set[str] = set()

    def compile_it(self: Any, *args: Any, **keywords: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | keywords
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        facts: dict[tuple[int], Any] = {}
        for index, (parameter, word) in enumerate(zip(self.params, self.arg_names, strict=True)):
            value = given[word]
            is_special = isinstance(value, int) and not parameter.do_not_specialize  # Triton looks at such numbers
            if parameter.is_constexpr or (is_special and value == 1):
                signature[word], constants[index,] = "constexpr", value
                continue
            signature[word] = f"*{NAMES[value.dtype]}" if isinstance(value, Tensor) else kind_of(value)
            if isinstance(value, Tensor) or (is_special and value % 16 == 0):
                facts[index,] = [["tt.divisibility", 16]]
        options = {word: keywords[word] for word in OPTIONS if word in keywords}
        key = f"{self.__name__} {signature} {constants} {facts} {options}"
        if key not in seen:
            seen.add(key)
            made = triton.compile(ASTSource(self, signature, constants, facts), target=target, options=options)
            print(f"{self.__module__.rpartition('.')[2]}.{self.__name__}", made.metadata.shared, flush=True)

    JITFunction.run = compile_it
    for shape in SHAPES:
        for n_rows in (1, 9):
            launch_products(n_rows, *shape)
            if target.backend == "cuda":
                launch_e4m3(n_rows, shape[0], shape[4])
        for n_rows, longest in ((1, 4096), (9, 4096), (200, 4096), (1, 100)):
            launch_attention(n_rows, longest, *shape[1:4])
    launch_sampling()
    launch_adjusting()
    launch_growth(137, 8, (False, True))  # trees of 8 steps of 8 and 8 prepared
    launch_growth(225, 25, (True,))  # 24 prepared; chances that fall take more


def kind_of(value: float) -> str:
    """Of a number."""
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that holds nothing."""
    return torch.empty(*shape, dtype=dtype, device=META)


def launch_products(
    n_rows: int, hidden: int, n_heads: int, n_kv: int, d: int, mlp: int, n_vocab: int, has_norms: bool
) -> None:
    """A layer's products, and the head's."""
    from saguaro.kernels.linear import TritonProducts, choose
    from saguaro.model.layout import Layout
    from saguaro.model.products import KVWrite, QKNormRope

    layout = Layout(META, torch.bfloat16)
    by, norm = TritonProducts(META, partial(choose, n_multiprocessors=132)), layout.norm(hidden, 1e-6, "")
    angles, head_norm = empty(n_rows, 1, d), layout.norm(d, 1e-6, "") if has_norms else None
    turn = QKNormRope(n_heads, head_norm, head_norm, angles, angles)
    place = KVWrite(empty(64, 2 * n_kv, d), empty(n_rows, dtype=torch.int64))
    stream = by.begin(empty(n_rows, hidden), norm)
    by.read_heads(stream, layout.linear(hidden, {"": (n_heads + 2 * n_kv) * d}), turn, place)
    stream = by.write(stream, empty(n_rows, n_heads * d), layout.linear(n_heads * d, {"": hidden}), norm)
    by.read_gated(stream, layout.linear(hidden, {"": 2 * mlp}))
    stream = by.write(stream, empty(n_rows, mlp), layout.linear(mlp, {"": hidden}), norm)
    by.read(stream, layout.linear(hidden, {"": n_vocab}), torch.float32)


def launch_e4m3(n_rows: int, hidden: int, mlp: int) -> None:
    """Products with weights in 8 bits."""
    from saguaro.kernels.fp8 import FP8Weight
    from saguaro.kernels.fp8_rows import multiply

    for n_in, n_out in ((hidden, 2 * mlp), (mlp, hidden)):
        weight = FP8Weight.empty(n_out, n_in, META)
        for rows in (n_rows, 64):
            multiply(empty(rows, n_in), weight.steps, weight.scales, None)
    multiply(empty(n_rows, mlp), weight.steps, weight.scales, empty(hidden))


def launch_attention(n_rows: int, longest: int, n_heads: int, n_kv: int, d: int) -> None:
    """Of the last tokens of a text, and of the nodes of a tree."""
    from saguaro.kernels.attention import attend, counters

    memory = empty(4096, 2 * n_kv, d)
    pages, arrived = empty(1, -(-longest // 16), dtype=torch.int32), counters(META)
    starts, lengths = (empty(n, dtype=torch.int32) for n in (2, 1))
    nodes = (lengths, empty(n_rows, dtype=torch.int32), empty(n_rows, 8, dtype=torch.int32))
    for tree in (None, nodes):
        attend(
            empty(n_rows, n_heads, d),
            memory,
            pages,
            starts,
            lengths,
            16,
            n_rows,
            longest,
            d**-0.5,
            nodes=tree,
            arrived=arrived,
        )


def launch_sampling() -> None:
    """The one best token, with and without limits, and the best few."""
    from saguaro.kernels.limits import limits
    from saguaro.kernels.sample import choose, rank

    logits, heat = empty(9, 151936, dtype=torch.float32), empty(9, dtype=torch.float32)
    seeds, positions = empty(9, dtype=torch.int64), empty(9, dtype=torch.int64)
    choose(logits, heat, seeds, positions, 151936)
    choose(logits, heat, seeds, positions, 151936, limits(logits, heat, seeds, heat, heat, 151936))
    rank(logits, heat, seeds, positions, 151936, 9)


def launch_adjusting() -> None:
    """Penalties, biases and masks, of chains and of trees."""
    from saguaro.kernels.adjust import adjust
    from saguaro.kernels.row_rules import CHANGED, MOST_BIASES, Tables, Texts

    counts, biases = empty(33, 151936, dtype=torch.int16), empty(33, MOST_BIASES, dtype=torch.int64)
    tables = Tables(counts, biases, empty(64, 4748, dtype=torch.int32), empty(64, dtype=torch.int32))
    for width, paths in ((5, None), (32, empty(2, 31, 4, dtype=torch.int64))):
        texts = Texts(empty(2, dtype=torch.int64), empty(2 * width, dtype=torch.int64), paths)
        rules = empty(2, CHANGED + 5, dtype=torch.int64)
        adjust(empty(2 * width, 151936, dtype=torch.float32), rules, texts, tables, 151936)


def launch_growth(n_places: int, n_children: int, falling: tuple[bool, ...]) -> None:
    """The bookkeeping of the first step of a draft, of one between, of the last, and of an outcome, for four rows."""
    from saguaro.draft.tree import AT_PLACE, LINEAGES, NO_TREE, Trees
    from saguaro.kernels.grow import advance, land, show

    trees, long = Trees.empty(4, n_places, n_children, 17, META), torch.int64
    state, which = trees.without_root, empty(4, dtype=long)
    table = (empty(192, dtype=torch.float32), empty(23, dtype=torch.float32), empty(n_children, dtype=long), 96)
    rest = (table, trees.root, which, empty(4, dtype=torch.float32), empty(4, dtype=long), (1e-6, 0.999, -1e-3))
    for n_before, n in ((1, 8), (8, 8), (8, 0)):
        index, place, position, depth = (empty(4, n_before, dtype=long) for _ in range(4))
        path, is_real = empty(4, n_before, 17, dtype=long), empty(4, n_before, dtype=torch.bool)
        before = (index, is_real, place, position, depth, path, empty(4, n_before, dtype=torch.float32))
        ranked = (empty(4 * n_before, n_children, dtype=long), empty(4 * n_before, n_children, dtype=torch.float32))
        for falls in falling:
            advance(state, before, ranked, *rest, LINEAGES, n, 8, False, falls)
    landed = land(state, trees.root, which, which, which, (NO_TREE, AT_PLACE))
    for n, is_chain in ((31, False), (8, True)):
        show(state, landed[2], which, landed[1], n, 8, is_chain, empty(4, 4 * n, dtype=long))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LIMITS:
        sys.exit(f"the arguments are {sys.argv[1:]}; give one of {', '.join(LIMITS)}")
    main(sys.argv[1])
