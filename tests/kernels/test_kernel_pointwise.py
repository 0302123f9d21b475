"""RMSNorm, the SwiGLU gate, rotary positions with the KV write, and packed products, against float64."""

import kernel_references as expected
import numpy as np
import pytest
import torch

from paceline_kernels import Linear, Op, add_rms_norm, gelu_tanh_mul, rms_norm, rope_and_cache, rope_rows, silu_mul

SHAPES = [(1, 2), (1, 576), (3, 7), (17, 64), (130, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
@pytest.mark.parametrize("op", [rms_norm, rms_norm.reference], ids=["cpu", "reference"])
def test_rms_norm(op, tokens, size, dtype):
    x, weight = random(tokens, size, dtype=dtype) * 30, random(size, dtype=dtype)
    expected.assert_close(op(x, weight, 1e-5), expected.rms_norm(expected.wide(x), expected.wide(weight), 1e-5))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 5), torch.ones(5), 1e-5), torch.zeros(2, 5))


@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_add_rms_norm_keeps_the_sum(tokens, size):
    x, residual, weight = random(tokens, size), random(tokens, size, seed=9), random(size)
    total = expected.wide(x) + expected.wide(residual)
    normed = add_rms_norm(x, residual, weight, 1e-6)
    expected.assert_close(normed, expected.rms_norm(total, expected.wide(weight), 1e-6))
    expected.assert_close(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_silu_mul(tokens, size, dtype):
    gate_up = random(tokens, 2 * size, dtype=dtype) * 4
    kept = gate_up.clone()
    expected.assert_close(silu_mul(gate_up), expected.silu_mul(expected.wide(gate_up)))
    assert torch.equal(gate_up, kept), "the input stays as it was"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_tanh_mul(dtype):
    gate_up = random(17, 64, dtype=dtype) * 4
    kept = gate_up.clone()
    expected.assert_close(gelu_tanh_mul(gate_up), expected.gelu_tanh_mul(expected.wide(gate_up)))
    assert torch.equal(gate_up, kept), "the input stays as it was"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [rms_norm, rms_norm.reference], ids=["cpu", "reference"])
def test_rms_norm_of_the_heads_of_a_fused_projection(op, dtype):
    x, weight = random(5, 6, 8, dtype=dtype)[:, 1:4], random(8, dtype=torch.float32)
    got = op(x, weight, 1e-6)
    assert got.dtype == dtype, "a weight in float32 doesn't widen the result"
    expected.assert_close(got, expected.rms_norm(expected.wide(x), expected.wide(weight), 1e-6))


def test_factors_scale_a_rotation_and_a_frequency_of_zero_is_none():
    frequencies, factors = torch.tensor([1.0, 0.1, 0.0]).double(), torch.tensor([1.3, 1.3, 1.0]).double()
    rows = rope_rows(torch.tensor([0, 7]), frequencies, torch.float64, factors)
    qkv = random(2, 3, 6, dtype=torch.float64)
    before = expected.wide(qkv)
    queries = rope_and_cache(qkv, rows, torch.zeros(1, 2, 2, 1, 6, dtype=torch.float64), torch.tensor([0, 1]), 1)
    for row, position in enumerate((0, 7)):
        turned = expected.rotate(before[row, 0], position, frequencies.numpy()) * np.tile(factors.numpy(), 2)
        expected.assert_close(queries[row, 0], turned)
    assert torch.equal(queries[:, 0, [2, 5]], torch.from_numpy(before[:, 0, [2, 5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (9, 3, 64), (6, 2, 10), (5, 5, 8)])
def test_rope_and_cache(heads, kv_heads, size, dtype):
    block_size, positions = 4, torch.tensor([0, 3, 17, 255])
    frequencies = 1 / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    rows = rope_rows(positions, frequencies, dtype)
    qkv = random(len(positions), heads + 2 * kv_heads, size, dtype=dtype)
    before = expected.wide(qkv)
    cache = torch.full((9, block_size, 2, kv_heads, size), 7.0, dtype=dtype)
    slots = torch.tensor([35, 0, 14, 13])

    queries = rope_and_cache(qkv, rows, cache, slots, heads)

    rotated = np.array(
        [
            [expected.rotate(vector, int(position), frequencies.numpy()) for vector in row[: heads + kv_heads]]
            for row, position in zip(before, positions, strict=True)
        ]
    )
    expected.assert_close(queries, rotated[:, :heads])
    flat = cache.view(-1, 2, kv_heads, size)
    expected.assert_close(flat[slots][:, 0], rotated[:, heads:])
    expected.assert_close(flat[slots][:, 1], before[:, heads + kv_heads :])
    untouched = [i for i in range(len(flat)) if i not in slots.tolist()]
    assert (flat[untouched] == 7).all(), "only the step's slots are written"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (64, 96), (33, 17), (576, 960)])
def test_linear(tokens, inputs, outputs, bias):
    x, weight = random(tokens, inputs), random(outputs, inputs, seed=3) / inputs**0.5
    offset = random(outputs, seed=4) if bias else None
    product = Linear(weight, offset)(x)
    exact = expected.wide(x) @ expected.wide(weight).T + (expected.wide(offset) if bias else 0)
    expected.assert_close(product, exact)


def test_linear_in_another_dtype():
    x, weight = random(3, 64, dtype=torch.bfloat16), random(8, 64, dtype=torch.bfloat16, seed=2) / 8
    expected.assert_close(Linear(weight)(x), expected.wide(x) @ expected.wide(weight).T)
    double = Linear(random(8, 4, dtype=torch.float64))
    assert not double.packed, "oneDNN has no float64"
    expected.assert_close(double(random(2, 4, dtype=torch.float64)), double_product())


def double_product():
    return expected.wide(random(2, 4, dtype=torch.float64)) @ expected.wide(random(8, 4, dtype=torch.float64)).T


def test_an_op_takes_the_implementation_of_its_device():
    op = Op(lambda x: "reference")
    assert op(torch.empty(1)) == "reference"
    op.register("cpu")(lambda x: "cpu")
    assert op(torch.empty(1)) == "cpu"
    assert op(torch.empty(1, device="meta")) == "reference"
    assert op.reference(torch.empty(1)) == "reference"
