"""The native CPU kernels against torch, under every instruction set that this CPU has. Where they aren't built: skipped."""

import pytest
import torch
from torch.nn.functional import gelu, rms_norm, silu

from paceline_kernels import AttentionPlanner, Gather, RowSampling, SequenceSpan, paged_attention, sample, use_kernels
from paceline_kernels.cpu import native
from paceline_kernels.cpu.layers import LayerParts, LayerShape, NativeLayers
from paceline_kernels.cpu.packed import PackedLinear
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, quantise_int4, quantise_rows

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu comes first")
# rows, inputs, outputs: one row, parts of tiles, more than a task's rows, and more inputs than are multiplied at once
GROUPED = [
    (1, 32, 16),
    (2, 96, 33),
    (8, 64, 40),
    (9, 576, 100),
    (17, 1536, 48),
    (70, 96, 64),
    (300, 128, 70),
    (1030, 544, 30),
]
SHAPES = [(1, 64, 32), (2, 100, 33), (3, 65, 7), (5, 576, 960), (17, 96, 49), (48, 1376, 64), (300, 130, 70)]
# from so many on AMX multiplies in bfloat16
ROWS_IN_BFLOAT16 = {"bfloat16": 5, "groups": 9}


def operands(shape):
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(size, generator=generator) for size in sizes]


def as_multiplied(kernels, form, shape, x, weight):
    """Return rows and weights as the kernels multiply them, in float64: AMX rounds rows to even and halves of weights up."""
    rows, inputs, _ = shape
    if kernels == "amx" and rows >= ROWS_IN_BFLOAT16[form] and inputs % 32 == 0:
        x, weight = x.bfloat16(), ((weight.float().view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
    return x.double(), weight.double()


def relative_error(found, expected):
    return (found.double() - expected).norm() / expected.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_product_with_whole_weights(kernels, shape, dtype):
    x, weight, bias = operands(shape)
    weight = weight.to(dtype)
    expected = x.double() @ weight.double().T + bias
    found = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=5e-4)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_product_with_bfloat16_weights(kernels, shape, biased):
    x, weight, bias = operands(shape)
    rows, exact = as_multiplied(kernels, "bfloat16", shape, x, weight.bfloat16())
    expected = rows @ exact.T + (bias if biased else 0)
    found = PackedLinear(weight.bfloat16(), bias if biased else None)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_product_with_int8_weights(kernels, shape):
    x, weight, bias = operands(shape)
    quantised = quantise_rows(weight, torch.int8)
    expected = x.double() @ quantised.dequantise().double().T + bias
    error = relative_error(PackedLinear(quantised, bias)(x), expected)
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
    """The weights count as they are but for AMX's many rows: what is left is the rounding of activations to 15 bits."""
    x, weight, bias = operands(shape)
    x[:, 5] *= 300  # one group with an outlier doesn't cost the others their bits
    stored = narrow(weight)
    rows, exact = as_multiplied(kernels, "groups", shape, x, stored.dequantise())
    assert relative_error(PackedLinear(stored, bias)(x), rows @ exact.T + bias) < 1e-4


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
    assert PackedLinear(weight).greedy(x, rows, norm, 1e-5) == expected.argmax(-1).tolist()
    with pytest.raises(IndexError, match="row 9"):
        PackedLinear(weight).greedy(x, torch.tensor([9]), norm, 1e-5)


def test_greedy_takes_the_first_of_the_largest(kernels):
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(1))
    logits[1, [7, 500]] = 9.0
    logits[2, 1002] = 9.0
    logits[3] = float("-inf")
    logits[3, 4] = -3.0
    assert sample(logits, [RowSampling(0.0)] * 5).tolist() == logits.argmax(-1).tolist()


SPANS = [(0, 33), (70, 1), (250, 1), (5, 3), (130, 40), (0, 1), (60, 131)]  # start, tokens
# every size of head in every type, windows and caps in turn; many heads that share one of keys are several tasks' rows
ATTENTION = [
    (16, 6, 2, None, None), (40, 6, 2, 20, None), (64, 6, 2, None, None), (64, 6, 2, 20, None), (64, 8, 1, 70, 3.0),
    (96, 8, 1, None, 5.0), (128, 6, 2, None, 5.0), (128, 4, 4, 70, 3.0),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "window", "soft_cap"), ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention(kernels, head_dim, heads, kv_heads, window, soft_cap, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    pool = torch.randperm(120, generator=generator).tolist()
    spans, used = [], 0
    for start, tokens in sorted(SPANS, key=lambda span: span[1] > 1):
        blocks = -(-(start + tokens) // 8)
        spans.append(SequenceSpan(start, tokens, pool[used : used + blocks]))
        used += blocks
    cache = torch.randn(120, 8, 2, kv_heads, head_dim, generator=generator).to(dtype)
    queries = torch.randn(sum(tokens for _, tokens in SPANS), heads, head_dim, generator=generator)
    batch = AttentionPlanner(8, torch.float32, window=window).plan(spans)
    options = {"window": window, "soft_cap": soft_cap}
    expected = paged_attention.reference(queries, cache.float(), batch, Gather(), head_dim**-0.5, **options)
    found = torch.ops.paceline_cpu.attention(
        queries, cache, batch.spans, batch.tables, head_dim**-0.5, soft_cap or 0.0, window or 0
    )
    if kernels == "amx" and dtype is not torch.float32 and head_dim % 32 == 0:
        for rows in torch.arange(len(queries)).split([span.num_tokens for span in spans]):
            # prompts are multiplied in bfloat16; one key too many or too few of 200 would be an error of 0.07
            assert relative_error(found[rows], expected[rows].double()) < 1e-2
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_of_many_decodes(kernels, window, dtype):
    """With sequences enough one thread reads a sequence for all heads, unless it is longer than a cache holds."""
    generator = torch.Generator().manual_seed(4)
    starts = [0, 1, 31, 32, 63, 64, 65, 127, 200, 301, 1500]
    spans, used = [], 0
    for start in starts:
        blocks = -(-(start + 1) // 16)
        spans.append(SequenceSpan(start, 1, range(used, used + blocks)))
        used += blocks
    cache = torch.randn(used, 16, 2, 3, 64, generator=generator).to(dtype)
    queries = torch.randn(len(starts), 6, 64, generator=generator)
    batch = AttentionPlanner(16, torch.float32, window=window).plan(spans)
    expected = paged_attention.reference(queries, cache.float(), batch, Gather(), 0.125, window=window)
    found = torch.ops.paceline_cpu.attention(queries, cache, batch.spans, batch.tables, 0.125, 0.0, window or 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 1, 32


def random_layer(narrow, post_norms):
    """Return a layer's norms and weights: what the kernels get, and the matrices that they stand for."""
    generator = torch.Generator().manual_seed(5)
    rows = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 2 * WIDE, HIDDEN)
    inputs = (HIDDEN, HEADS * HEAD_DIM, HIDDEN, WIDE)
    stored = [narrow(torch.randn(size, generator=generator) / size[1] ** 0.5) for size in zip(rows, inputs, strict=True)]
    whole = [(w.float() if isinstance(w, torch.Tensor) else w.dequantise()).double() for w in stored]
    there = (True, False, False, post_norms, True, post_norms)
    norms = tuple(torch.rand(HIDDEN, generator=generator) + 0.5 if one else None for one in there)
    return LayerParts(norms, tuple(PackedLinear(w) for w in stored), 0, None), whole


def expected_layer(x, norms, whole, gate, batch):
    """Return what the layer leaves of `x` [T, HIDDEN] by float64 products, without rotations."""
    cache = torch.zeros(8, 16, 2, KV_HEADS, HEAD_DIM, dtype=torch.float64)

    def normed(values, number):
        return values if norms[number] is None else rms_norm(values, (HIDDEN,), norms[number].double(), 1e-5)

    queries, keys = (normed(x, 0) @ whole[0].T).view(len(x), -1, HEAD_DIM).split([HEADS, 2 * KV_HEADS], 1)
    cache.view(-1, 2, KV_HEADS, HEAD_DIM)[batch.slots] = keys.unflatten(1, (2, KV_HEADS))
    heads = paged_attention.reference(queries, cache, batch, Gather(), HEAD_DIM**-0.5)
    x = x + normed(heads.flatten(1) @ whole[1].T, 3)
    gated, up = (normed(x, 4) @ whole[2].T).chunk(2, 1)
    return x + normed((gate(gated) * up) @ whole[3].T, 5)


@pytest.mark.parametrize("tokens", [1, 7, 45])
@pytest.mark.parametrize("post_norms", [False, True])
@pytest.mark.parametrize("narrow", [four_bits, eight_bits, torch.Tensor.bfloat16, torch.Tensor.float])
def test_a_layer(kernels, tokens, post_norms, narrow):
    part, whole = random_layer(narrow, post_norms)
    gate = (lambda values: gelu(values, approximate="tanh")) if tokens == 7 else silu
    shape = LayerShape(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, tokens == 7, 1e-5, HEAD_DIM**-0.5, None)
    batch = AttentionPlanner(16, torch.float32).plan([SequenceSpan(0, tokens, [3, 1, 6])])
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    expected = expected_layer(x.double(), part.norms, whole, gate, batch)
    cache = torch.zeros(8, 16, 2, KV_HEADS, HEAD_DIM, dtype=torch.float32 if narrow is torch.Tensor.float else torch.float16)
    still = [(torch.zeros(HEAD_DIM // 2), None)]
    found = NativeLayers(shape, [part], still).run(x.clone(), batch, [cache])
    bound = 1e-6 if narrow is torch.Tensor.float else 1e-2 if kernels == "amx" else 5e-4  # KV has 11 bits, AMX 8
    assert relative_error(found, expected) < bound


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
