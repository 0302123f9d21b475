"""The native CPU kernels against torch, under every instruction set that this CPU has. Where they aren't built: skipped."""

import pytest
import torch

from paceline_kernels import AttentionPlanner, Gather, RowSampling, SequenceSpan, paged_attention, sample, use_kernels
from paceline_kernels.cpu import native
from paceline_kernels.cpu.packed import PackedLinear
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, quantise_int4, quantise_rows

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu comes first")
GROUPED = [(1, 32, 16), (2, 96, 33), (8, 64, 40), (9, 576, 100), (17, 1536, 48), (70, 96, 64), (300, 128, 70)]
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


def four_bits(weight):
    exact = quantise_int4(weight, 32)
    return Int4Weight(exact.values, exact.scales.half(), exact.minimums.half())


def eight_bits(weight):
    grouped = weight.unflatten(1, (-1, 32))
    scales = (grouped.abs().amax(-1) / 127).half()
    return Int8GroupWeight((grouped / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(1), scales)


@pytest.mark.parametrize("shape", GROUPED)
@pytest.mark.parametrize("narrow", [four_bits, eight_bits])
def test_product_with_groups(kernels, shape, narrow):
    """The weights count as they are: what is left is the rounding of activations to 15 bits, or their split in two."""
    x, weight, bias = operands(shape)
    x[:, 5] *= 300  # one group with an outlier doesn't cost the others their bits
    stored = narrow(weight)
    expected = x.double() @ stored.dequantise().double().T + bias
    error = (PackedLinear(stored, bias)(x).double() - expected).norm() / expected.norm()
    assert error < 1e-4


@pytest.mark.parametrize("narrow", [four_bits, eight_bits, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float])
def test_a_packed_table_gives_its_rows(kernels, narrow):
    weight = narrow(operands((1, 96, 50))[1])
    whole = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantise()
    ids = torch.tensor([0, 49, 17, 17, 31])
    torch.testing.assert_close(PackedLinear(weight).rows(ids), whole[ids], rtol=1e-6, atol=1e-6)
    with pytest.raises(IndexError, match="id 50 is outside"):
        PackedLinear(weight).rows(torch.tensor([50]))


def test_a_table_in_8_bits_gives_its_rows(kernels):
    quantised = quantise_rows(operands((1, 70, 50))[1], torch.int8)
    ids = torch.tensor([3, 49])
    torch.testing.assert_close(PackedLinear(quantised).rows(ids), quantised.dequantise()[ids])


def test_head_norms_the_rows_that_it_is_asked_for(kernels):
    x, weight, _ = operands((9, 64, 40))
    norm, rows = torch.rand(64) + 0.5, torch.tensor([8, 0, 3])
    expected = torch.nn.functional.rms_norm(x[rows], (64,), norm, 1e-5) @ weight.T
    torch.testing.assert_close(PackedLinear(weight).head(x, rows, norm, 1e-5), expected, rtol=1e-4, atol=1e-4)


def test_greedy_takes_the_first_of_the_largest(kernels):
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(1))
    logits[1, [7, 500]] = 9.0
    logits[2, 1002] = 9.0
    logits[3] = float("-inf")
    logits[3, 4] = -3.0
    assert sample(logits, [RowSampling(0.0)] * 5).tolist() == logits.argmax(-1).tolist()


SPANS = [(0, 33), (70, 1), (250, 1), (5, 3), (130, 40), (0, 1)]  # start, tokens


@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 5.0), (70, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(kernels, head_dim, window, soft_cap, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    pool = torch.randperm(120, generator=generator).tolist()
    spans, used = [], 0
    for start, tokens in sorted(SPANS, key=lambda span: span[1] > 1):
        blocks = -(-(start + tokens) // 8)
        spans.append(SequenceSpan(start, tokens, pool[used : used + blocks]))
        used += blocks
    cache = torch.randn(120, 8, 2, 2, head_dim, generator=generator).to(dtype)
    queries = torch.randn(sum(tokens for _, tokens in SPANS), 6, head_dim, generator=generator)
    batch = AttentionPlanner(8, torch.float32, window=window).plan(spans)
    options = {"window": window, "soft_cap": soft_cap}
    expected = paged_attention.reference(queries, cache.float(), batch, Gather(), head_dim**-0.5, **options)
    found = torch.ops.paceline_cpu.attention(
        queries, cache, batch.spans, batch.tables, head_dim**-0.5, soft_cap or 0.0, window or 0
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_zero_rows_stay_zero(kernels):
    quantised = quantise_rows(operands((1, 64, 32))[1], torch.int8)
    assert not PackedLinear(quantised)(torch.zeros(3, 64)).any()
    assert not PackedLinear(four_bits(operands((1, 64, 32))[1]))(torch.zeros(3, 64)).any()


def test_the_planner_gives_native_kernels_their_tables_and_nothing_else():
    spans = [SequenceSpan(20, 1, [4, 9, 7]), SequenceSpan(0, 17, [1, 2])]
    batch = AttentionPlanner(16, torch.float32, native=True).plan(spans)
    assert batch.spans.tolist() == [[20, 1, 0], [0, 17, 2]]
    assert batch.tables.tolist() == [4, 9, 1, 2]
    assert not batch.decodes and not batch.prefills


def test_they_run_unless_others_are_asked_for():
    assert native.in_use(), "by themselves where they are built"
    with use_kernels("torch"):
        assert not native.in_use()
    assert native.start(threads=2) in native.CPU_KERNELS
    assert native.running()[1] == 2
