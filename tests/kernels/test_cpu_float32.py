"""What the CPU kernels promise of float32: its own rounding, whichever products they are made of, and its infinities."""

import pytest
import torch
from torch.nn.functional import silu

from paceline_kernels import AttentionPlanner, Gather, SequenceSpan, paged_attention
from paceline_kernels.cpu import native
from paceline_kernels.cpu.layers import LayerParts, LayerShape, NativeLayers
from paceline_kernels.cpu.packed import PackedLinear

pytestmark = pytest.mark.skipif(not native.is_built(), reason="python -m paceline_kernels.cpu comes first")
# rows, inputs, outputs: one tile of rows and two, parts of tiles, several blocks of rows, inputs beyond those summed at once
SHAPES = [(1, 576, 70), (13, 576, 33), (16, 192, 32), (17, 32, 16), (32, 1536, 96), (70, 224, 100), (330, 608, 40)]
UNIT = 2.0**-24  # of a float32 number, the most that rounding changes it by


def normal(size, generator):
    return torch.randn(size, generator=generator)


def scattered(size, generator):
    """Return normal numbers over some twelve decades."""
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).mul(3).exp()


def positive(size, generator):
    return torch.rand(size, generator=generator)


def few_bits(size, generator):
    """Return numbers whose smaller parts are zero but in every fifth."""
    exact = torch.randint(-8, 9, size, generator=generator).float()
    return exact + torch.where(torch.rand(size, generator=generator) < 0.2, 2.0**-20, 0.0)


def product(numbers, shape, bias=False):
    """Return by how many units of the sum of its terms' magnitudes each number of a product is off."""
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    x, weight = numbers((rows, inputs), generator), numbers((outputs, inputs), generator)
    added = torch.randn(outputs, generator=generator) if bias else None
    found = PackedLinear(weight, added)(x)
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if added is not None:
        exact, magnitude = exact + added, magnitude + added.abs()
    return (found.double() - exact).abs() / magnitude / UNIT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numbers", [normal, scattered, positive, few_bits])
def test_a_product_is_as_exact_as_float32(kernels, numbers, shape):
    off = product(numbers, shape, bias=shape[0] % 2 == 1)
    # a sum of 576 terms in float32, some of them nearly all of it, was off by up to 14 units, by 0.2 on the average; two
    # bfloat16 parts instead of three would be off by 256
    assert off.max() < 24
    assert off.square().mean().sqrt() < 4


def test_parts_are_no_less_exact_than_plain_products():
    try:
        native.start("amx", threads=2)
    except RuntimeError:
        pytest.skip("this CPU has no amx")
    off = {}
    for name in ("amx", "avx512"):
        native.start(name, threads=2)
        off[name] = product(scattered, (64, 1536, 96)).square().mean().sqrt()
    native.start()
    assert off["amx"] < 1.2 * off["avx512"]


@pytest.mark.parametrize("inputs", [224, 576])
def test_a_row_has_the_same_bits_beside_any_number_of_others(kernels, inputs):
    generator = torch.Generator().manual_seed(3)
    linear = PackedLinear(torch.randn(70, inputs, generator=generator))
    x = torch.randn(100, inputs, generator=generator)
    every = linear(x)
    for rows in (17, 32, 33, 64, 99):
        assert torch.equal(linear(x[:rows]), every[:rows]), f"{rows} rows"
        assert torch.equal(linear(x[100 - rows :]), every[100 - rows :]), f"the last {rows} rows"


INFINITE = float("inf")
ODD = {
    "infinite": lambda x, weight: x[3].fill_(INFINITE),
    "one infinite": lambda x, weight: x[3, 40].fill_(-INFINITE),
    "not a number": lambda x, weight: x[20, 5].fill_(float("nan")),
    "the largest": lambda x, weight: x[:, 0].fill_(torch.finfo(torch.float32).max),
    "sum overflows": lambda x, weight: x[2].fill_(1e38),
    "infinite weight": lambda x, weight: weight[3, 7].fill_(INFINITE),
    "weight not a number": lambda x, weight: weight[3, 7].fill_(float("nan")),
    "large weight": lambda x, weight: weight[5].fill_(3e38),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinities_come_where_float32_has_them(kernels, odd, dtype):
    generator = torch.Generator().manual_seed(1)
    # whole numbers, whose smaller parts are zero: infinity times such a part would not be a number
    x, weight = (torch.randint(1, 5, size, generator=generator).float() for size in ((33, 96), (40, 96)))
    ODD[odd](x, weight)
    stored = weight.to(dtype)
    expected = x @ stored.float().T
    torch.testing.assert_close(PackedLinear(stored)(x), expected, rtol=1e-5, atol=0, equal_nan=True)
    if odd != "large weight" or dtype is torch.float16:
        assert not expected.isfinite().all()


def test_numbers_near_underflow_lose_no_more_than_that(kernels):
    """AMX takes what is below 2^-126 for zero: of a product that is one such part times the other factor."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(40, 64, generator=generator) * 1e-36, torch.randn(32, 64, generator=generator)
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    lost = 2.0**-126 * (1 + weight.abs().double().sum(1))
    assert ((PackedLinear(weight)(x).double() - exact).abs() <= 24 * UNIT * magnitude + 64 * lost).all()


HIDDEN, WIDE, HEAD_DIM = 64, 96, 32


@pytest.mark.parametrize("scale", [1.0, 1e13])
def test_a_gate_may_let_through_what_parts_cannot_stand_for(kernels, scale):
    """Gated numbers of 1e26 are finite in float32, and so is what comes of them."""
    generator = torch.Generator().manual_seed(6)
    sizes = ((3 * HEAD_DIM, HIDDEN), (HIDDEN, HEAD_DIM), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    weights = [torch.randn(size, generator=generator) / size[1] ** 0.5 for size in sizes]
    weights[1].zero_()  # attention adds nothing
    weights[2] *= scale
    weights[3] /= scale**2
    norm, x = torch.ones(HIDDEN), torch.randn(45, HIDDEN, generator=generator)
    normed = torch.nn.functional.rms_norm(x.double(), (HIDDEN,), eps=1e-5)
    gate, up = (normed @ weights[2].double().T).chunk(2, 1)
    expected = x + (silu(gate) * up) @ weights[3].double().T
    part = LayerParts((norm, None, None, None, norm, None), tuple(PackedLinear(w) for w in weights), 0, None)
    layers = NativeLayers(
        LayerShape(HIDDEN, 1, 1, HEAD_DIM, WIDE, False, 1e-5, 1.0, None), [part], [(torch.zeros(HEAD_DIM // 2), None)]
    )
    batch = AttentionPlanner(16, torch.float32).plan([SequenceSpan(0, 45, [3, 1, 6])])
    found = layers.run(x.clone(), batch, [torch.zeros(8, 16, 2, 1, HEAD_DIM)])
    assert (found.double() - expected).norm() < 1e-6 * expected.norm()


def attend(queries, cache, spans, window=None, soft_cap=None):
    """Return attention by the kernels, and by float64."""
    batch = AttentionPlanner(16, torch.float32, window=window).plan(spans)
    scale = HEAD_DIM**-0.5
    expected = paged_attention.reference(
        queries.double(), cache.double(), batch, Gather(), scale, window=window, soft_cap=soft_cap
    )
    op = torch.ops.paceline_cpu.attention
    return op(queries, cache, batch.spans, batch.tables, scale, soft_cap or 0.0, window or 0), expected


@pytest.mark.parametrize(("window", "soft_cap", "stretch"), [(None, None, 1.0), (70, None, 8.0), (None, 5.0, 3.0)])
def test_prompts_attend_as_exactly_as_float32(kernels, window, soft_cap, stretch):
    """Also where a few keys have all the weight (`stretch`): then an error of a score counts in full."""
    generator = torch.Generator().manual_seed(8)
    spans = [SequenceSpan(0, 300, list(range(19))), SequenceSpan(90, 60, list(range(20, 30)))]
    cache = torch.randn(32, 16, 2, 2, HEAD_DIM, generator=generator)
    queries = torch.randn(360, 6, HEAD_DIM, generator=generator) * stretch
    found, expected = attend(queries, cache, spans, window, soft_cap)
    expected = expected.reshape(found.shape)
    # plain float32 is off by 3e-7 to 1.2e-6 of this; two bfloat16 parts would be by 1e-4
    assert (found - expected).abs().max() < 4e-6 * stretch * expected.abs().max()


def test_attention_to_what_parts_cannot_stand_for(kernels):
    generator = torch.Generator().manual_seed(9)
    cache, queries = (
        torch.randn(8, 16, 2, 1, HEAD_DIM, generator=generator),
        torch.randn(100, 1, HEAD_DIM, generator=generator),
    )
    cache[2, 3, 1, 0, 5] = 1e30  # a value at position 35
    queries[70, 0, 0] = float("nan")
    found, expected = attend(queries, cache, [SequenceSpan(0, 100, list(range(7)))])
    torch.testing.assert_close(found.double(), expected.reshape(found.shape), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found[70].isnan().any() and found[71].isfinite().all()
