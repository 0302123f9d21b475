"""Quantised products of the runtime through the Triton kernels, against what their weights mean."""

import pytest
import torch

pytest.importorskip("triton")

from triton_support import DEVICE, assert_near, randn

from paceline_kernels import use_kernels
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, quantise_int4, quantise_rows
from paceline_runtime.quantised_linear import QuantisedLinear


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bias", [False, True])
def test_products(kind, bias):
    x, weight = randn(3, 128), randn(40, 128, seed=1) / 128**0.5
    if kind == "int8":
        stored = quantise_rows(weight, torch.int8)
    else:
        exact = quantise_int4(weight, 32)
        stored = Int4Weight(exact.values, exact.scales.half(), exact.minimums.half())
    offset = randn(40, seed=2) if bias else None
    with use_kernels("triton"):
        got = QuantisedLinear(stored, offset)(x)
    expected = x.double() @ stored.dequantise().double().T + (0 if offset is None else offset.double())
    assert got.device.type == DEVICE
    assert_near(got, expected)
