"""RMSNorm, gates, rotary positions with the KV write, and block copies in Triton against float64."""

import pytest
import torch

pytest.importorskip("triton")

from triton_support import DEVICE, assert_near, randn

from paceline_kernels import RopeRows
from paceline_kernels import add_rms_norm as add_rms_norm_op
from paceline_kernels import rms_norm as rms_norm_op
from paceline_kernels import rope_and_cache as rope_op
from paceline_kernels import silu_mul as silu_mul_op
from paceline_kernels.triton_ops.block_copy import copy_blocks
from paceline_kernels.triton_ops.gate import gelu_mul, gelu_tanh_mul, silu_mul
from paceline_kernels.triton_ops.norm import add_rms_norm, rms_norm
from paceline_kernels.triton_ops.rope import rope_and_cache

FP8 = torch.float8_e4m3fn
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 3, 17]
full = pytest.mark.slow


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [(3, 576, torch.float32), (1, 4096, torch.bfloat16), (0, 64, torch.float16)]
    + [pytest.param(r, s, d, marks=full) for r in ROWS for s in (1, 64, 127, 576, 5120) for d in FLOATS],
)
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    assert_near(rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))


def test_rms_norm_of_heads_in_a_view_of_the_fused_projection() -> None:
    qkv, weight = randn(5, 7, 80), randn(80, seed=1)
    assert_near(rms_norm(qkv[:, :3], weight, 1e-5), normed(qkv[:, :3], weight, 1e-5))


@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [(3, 576, torch.float16)] + [pytest.param(r, s, d, marks=full) for r in ROWS for s in (64, 100, 4096) for d in FLOATS],
)
def test_add_rms_norm_normalises_the_rounded_sum(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    total = x.double() + residual.double()
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert_near(residual, total)
    assert_near(out, normed(residual, weight, 1e-6))


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(2, 1500, torch.bfloat16)] + [pytest.param(r, w, d, marks=full) for r in ROWS for w in (1, 1024, 1536) for d in FLOATS],
)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gates(rows: int, width: int, dtype: torch.dtype, kind: str) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    gate_up[0, 0] = -200.0  # an exponential of it would overflow
    gate, up = gate_up.double().chunk(2, -1)
    ops = {"silu": silu_mul, "gelu": gelu_mul, "gelu_tanh": gelu_tanh_mul}
    expected = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
    }
    assert_near(ops[kind](gate_up), expected[kind](gate) * up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return x.double() * cos.double()[:, None] + swapped.double() * sin.double()[:, None]


def angles(count: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.outer(torch.arange(count).double(), 1.0 / 100.0 ** (torch.arange(size // 2) / (size // 2)))
    cos, sin = turn.cos(), turn.sin()
    return torch.cat((cos, cos), -1).to(dtype).to(DEVICE), torch.cat((-sin, sin), -1).to(dtype).to(DEVICE)


ROPE = [(7, 4, 2, 64, torch.float32, None), (3, 8, 1, 80, torch.bfloat16, torch.int8), (2, 9, 3, 128, torch.float16, FP8)]
ROPE_FULL = [
    (5, heads, kv, size, dtype, stored)
    for heads, kv in ((1, 1), (4, 2), (16, 1))
    for size in (64, 80, 96, 128, 256)
    for dtype in FLOATS
    for stored in (None, torch.int8, FP8)
]


@pytest.mark.parametrize(
    ("count", "heads", "kv_heads", "size", "dtype", "stored"), ROPE + [pytest.param(*c, marks=full) for c in ROPE_FULL]
)
def test_rope_and_cache(
    count: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    qkv = randn(count, heads + 2 * kv_heads, size, dtype=dtype)
    original = qkv.clone()
    cos, sin = angles(64, size, dtype)
    positions = torch.tensor([3, 0, 63, 17, 5, 40, 41][:count], device=DEVICE)
    slots = torch.tensor([33, 0, 47, 31, 16, 32, 2][:count], device=DEVICE)
    slots[1] = -1  # padding
    cache = torch.zeros((3, 16, 2, kv_heads, size), device=DEVICE).to(stored or dtype)
    scales = torch.zeros((3, 16, 2, kv_heads), device=DEVICE) if stored else None
    queries = rope_and_cache(qkv, cos, sin, cache, slots, heads, positions=positions, kv_scales=scales)
    turned = rotate(original[:, : heads + kv_heads], cos[positions], sin[positions])
    assert_near(queries, turned[:, :heads])
    assert torch.equal(qkv[:, heads + kv_heads :], original[:, heads + kv_heads :])
    expected = torch.zeros((48, 2, kv_heads, size), dtype=torch.float64, device=DEVICE)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot, 0], expected[slot, 1] = turned[token, heads:], original[token, heads + kv_heads :].double()
    written = cache.double() if scales is None else cache.double() * scales[..., None].double()
    if stored is None:
        assert_near(written.view(expected.shape), expected, dtype)
    else:
        assert_quantised(written.view(expected.shape), expected, stored)


def assert_quantised(written: torch.Tensor, expected: torch.Tensor, stored: torch.dtype) -> None:
    """Half a step of int8, or a sixteenth of float8's three mantissa bits and a step where it is subnormal."""
    largest = expected.abs().amax(-1, keepdim=True)
    step = largest / 127 * 0.51 if stored == torch.int8 else expected.abs() * 0.063 + largest / 448 * 2**-9
    assert ((written - expected).abs() <= step + 1e-2 * largest / 127).all()


def test_rope_rows_may_come_gathered() -> None:
    qkv, (cos, sin) = randn(4, 4, 64), angles(4, 64, torch.float32)
    cache, slots = torch.zeros((1, 16, 2, 1, 64), device=DEVICE), torch.arange(4, device=DEVICE)
    expected = rotate(qkv[:, :2].clone(), cos, sin)
    assert_near(rope_and_cache(qkv, cos, sin, cache, slots, 2), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, FP8], ids=str)
@pytest.mark.parametrize("pairs", [[], [[0, 5]], [[1, 4], [1, 0], [3, 2]]])
def test_copy_blocks_moves_bits(dtype: torch.dtype, pairs: list[list[int]]) -> None:
    cache = (randn(6, 16, 2, 3, 52) * 20).to(dtype)  # 4992 numbers, more than a program's share of 32-bit words
    expected = cache.view(torch.uint8 if dtype.itemsize == 1 else torch.int32).clone()
    for source, target in pairs:
        expected[target] = expected[source].clone()
    copy_blocks(cache, torch.tensor(pairs, dtype=torch.int64, device=DEVICE).view(-1, 2))
    assert torch.equal(cache.view(expected.dtype), expected)


def test_the_ops_find_the_kernels_on_a_gpu_with_the_same_arguments_as_the_references() -> None:
    x, residual, weight = randn(3, 64), randn(3, 64, seed=1), randn(64, seed=2)
    assert_near(rms_norm_op.on("cuda")(x, weight, 1e-6), rms_norm_op.reference(x, weight, 1e-6), torch.float32)
    sums = residual.clone(), residual.clone()
    outs = [
        op(x, total, weight, 1e-6)
        for op, total in zip((add_rms_norm_op.on("cuda"), add_rms_norm_op.reference), sums, strict=True)
    ]
    assert_near(*outs)
    assert_near(*sums)
    assert_near(silu_mul_op.on("cuda")(x), silu_mul_op.reference(x))


def test_the_rope_op_on_a_gpu_leaves_queries_keys_and_cache_as_the_reference_does() -> None:
    qkv, (cos, sin) = randn(4, 6, 64), angles(4, 64, torch.float32)
    rows, slots = RopeRows(cos.unsqueeze(1), sin.unsqueeze(1)), torch.tensor([5, 6, 7, 30], device=DEVICE)
    results = []
    for op in (rope_op.on("cuda"), rope_op.reference):
        own, cache = qkv.clone(), torch.zeros((2, 16, 2, 2, 64), device=DEVICE)
        results.append((op(own, rows, cache, slots, 2), own, cache))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)
