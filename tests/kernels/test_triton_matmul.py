"""Products with quantised weights in Triton against float64 products of what the stored numbers mean."""

import pytest
import torch

pytest.importorskip("triton")

from triton_support import DEVICE, assert_near, randn

from paceline_kernels.triton_ops.quantised_matmul import int4_matmul, quantise_activations, row_scaled_matmul
from paceline_kernels.triton_ops.quantised_weights import quantise_int4, quantise_rows

FP8 = torch.float8_e4m3fn
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# rows, outputs, depth: the last is split along K, and both have edges within a tile
SHAPES = [(1, 64, 128), (3, 70, 576), (17, 130, 1088), (70, 40, 1152)]
full = pytest.mark.slow


def inputs(rows: int, size: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, weight and bias so scaled that results are about 1, as the tolerances take for granted."""
    return randn(rows, depth, dtype=dtype), randn(size, depth, seed=1) * depth**-0.5, randn(size, dtype=dtype, seed=2)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


QUICK_ROWS = [
    (SHAPES[1], torch.bfloat16, torch.int8),
    (SHAPES[2], torch.float16, FP8),
    (SHAPES[3], torch.float32, torch.int8),
]
ALL_ROWS = [pytest.param(s, d, w, marks=full) for s in SHAPES for d in FLOATS for w in (torch.int8, FP8)]


@pytest.mark.parametrize(("shape", "dtype", "stored"), QUICK_ROWS + ALL_ROWS)
def test_row_scaled_weights(shape: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype) -> None:
    x, weight, bias = inputs(*shape, dtype)
    quantised = quantise_rows(weight, stored)
    assert_near(row_scaled_matmul(x, quantised, bias), product(x, quantised.dequantise(), bias))
    assert_near(row_scaled_matmul(x[:1], quantised), product(x[:1], quantised.dequantise(), None))


QUICK_INT4 = [(SHAPES[1], torch.bfloat16, 32), (SHAPES[3], torch.float16, 128), (SHAPES[2], torch.float32, 64)]
ALL_INT4 = [
    pytest.param(s, d, g, marks=full) for s in SHAPES for d in FLOATS for g in (32, 64, 128) if s[2] % g == 0
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "group"), QUICK_INT4 + ALL_INT4)
def test_int4_weights(shape: tuple[int, int, int], dtype: torch.dtype, group: int) -> None:
    x, weight, bias = inputs(*shape, dtype)
    quantised = quantise_int4(weight, group)
    assert quantised.group == group
    # weights are rounded once more, to the dtype of x, as a widened weight in memory would be
    widened = quantised.dequantise().to(dtype)
    assert_near(int4_matmul(x, quantised, bias), product(x, widened, bias))


@pytest.mark.parametrize("shape", [SHAPES[2], pytest.param(SHAPES[0], marks=full), pytest.param(SHAPES[3], marks=full)])
def test_float8_products(shape: tuple[int, int, int]) -> None:
    x, weight, bias = inputs(*shape, torch.float16)
    values, scales = quantise_activations(x)
    quantised = quantise_rows(weight, FP8)
    meant = values.double() * scales[:, None].double()
    out = row_scaled_matmul(values, quantised, bias, scales, dtype=torch.float16)
    assert_near(out, product(meant, quantised.dequantise(), bias))


def test_quantised_activations_are_within_half_a_float8_step() -> None:
    x = randn(3, 200, dtype=torch.bfloat16) * 50
    x[1] = 0
    values, scales = quantise_activations(x)
    off = (values.double() * scales[:, None].double() - x.double()).abs()
    assert (off <= x.double().abs() / 16 + scales[:, None] * 2**-9).all()
    assert values[1].double().abs().max() == 0


@pytest.mark.parametrize("group", [32, 128])
def test_int4_rounding_is_within_half_a_step_and_keeps_the_range(group: int) -> None:
    weight = randn(5, 256)
    grouped = weight.view(5, -1, group)
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    off = (quantise_int4(weight, group).dequantise().view_as(grouped) - grouped).abs()
    assert (off <= step[..., None] * 0.5001).all()
    assert quantise_int4(torch.full((1, group), 3.0), group).dequantise().unique().tolist() == [3.0]


@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_has_the_same_bits_in_any_batch_of_the_same_tile(rows: int) -> None:
    x, weight, _ = inputs(9, 70, 1088, torch.float32)
    quantised = quantise_rows(weight, torch.int8)
    assert torch.equal(row_scaled_matmul(x, quantised)[:rows], row_scaled_matmul(x[:rows], quantised))


def test_no_rows_give_no_rows() -> None:
    weight = quantise_rows(randn(64, 128), torch.int8)
    assert row_scaled_matmul(torch.empty(0, 128, device=DEVICE), weight).shape == (0, 64)
