"""The native CPU kernels against torch, under every instruction set that this CPU has. Where they aren't built: skipped."""

import pytest
import torch

from paceline_kernels import AttentionPlanner, SequenceSpan, use_kernels
from paceline_kernels.cpu import native
from paceline_kernels.cpu.packed import PackedLinear
from paceline_kernels.triton_ops.quantised_weights import quantise_rows

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu.build comes first")
SHAPES = [(1, 64, 32), (2, 100, 33), (3, 65, 7), (5, 576, 960), (17, 96, 49), (300, 130, 70)]  # rows, inputs, outputs


@pytest.fixture(params=native.CPU_KERNELS)
def kernels(request):
    try:
        yield native.start(request.param, threads=2)
    except RuntimeError:
        pytest.skip(f"this CPU has no {request.param}")
    native.start()


def operands(shape):
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_product_with_whole_weights(kernels, shape, dtype):
    x, weight, bias = operands(shape)
    weight = weight.to(dtype)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(PackedLinear(weight, bias)(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_product_with_int8_weights(kernels, shape):
    x, weight, bias = operands(shape)
    quantised = quantise_rows(weight, torch.int8)
    expected = x.double() @ quantised.dequantise().double().T + bias
    error = (PackedLinear(quantised, bias)(x).double() - expected).norm() / expected.norm()
    assert error < 2e-4, "activations of 13 bits and more leave no larger error"


def test_zero_rows_stay_zero(kernels):
    quantised = quantise_rows(operands((1, 64, 32))[1], torch.int8)
    assert not PackedLinear(quantised)(torch.zeros(3, 64)).any()


def test_the_planner_gives_native_kernels_their_tables_and_nothing_else():
    spans = [SequenceSpan(20, 1, [4, 9, 7]), SequenceSpan(0, 17, [1, 2])]
    batch = AttentionPlanner(16, torch.float32, native=True).plan(spans)
    assert batch.spans.tolist() == [[20, 1, 0], [0, 17, 2]]
    assert batch.tables.tolist() == [4, 9, 1, 2]
    assert not batch.decodes and not batch.prefills


def test_they_run_only_where_they_are_asked_for():
    assert native.native_name() is None
    with use_kernels("native"):
        assert native.native_name() in native.CPU_KERNELS
