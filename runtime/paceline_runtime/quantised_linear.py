"""Weight-only quantisation while loading: products whose weights are kept in 8 or 4 bits.

| name | a weight is kept as | error of a weight |
|---|---|---|
| `int8` | 8 bits, with a scale per output | half a step of 1/127 of its row's largest |
| `int4` | 4 bits in groups of 32 inputs, each with scale and minimum | half a step of 1/15 of its group's range |
| `fp8` | float8 (e4m3), with a scale per output; GPUs that multiply float8 | 3 bits of mantissa |

On a GPU the products run in Triton, widened in registers. On a CPU a piece of the weight is widened into a scratch that
stays in the cache, multiplied, and the next piece takes its place: slower than whole weights in a small batch, but the
memory is what the table says. The native CPU kernels (`paceline_kernels.cpu`), where they are built, multiply narrow weights
with activations of 16 bits instead and widen nothing for a small batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from paceline_kernels import Linear, kernels_in_use
from paceline_kernels.cpu.native import in_use
from paceline_kernels.cpu.packed import AnyWeight, PackedLinear, packs
from paceline_kernels.triton_ops.quantised_weights import (
    Int4Weight,
    Int8GroupWeight,
    RowScaledWeight,
    quantise_int4,
    quantise_rows,
)
from paceline_runtime.decoder_weights import Projection, Projector
from paceline_runtime.model_errors import UnsupportedModel

__all__ = ["QUANTIZATIONS", "QuantisedLinear", "check_supported", "head_maker", "plain", "projection_maker"]

QUANTIZATIONS = ("int8", "int4", "fp8")
_GROUP = 32
# NVIDIA's Ada (8.9) is the first that multiplies float8
_FP8_CAPABILITY = (8, 9)
# A piece of 1 MiB stays in the second-level cache. 256 rows of 576 in float32 cost 0.3 ms (int8) and 1.2 ms (int4) per
# 1.8 million weights on one AVX-512 core, half of what pieces of a quarter or of four times the size cost.
_PIECE_BYTES = 1024 * 1024
# Torch's fused product takes the time of its rows one by one: in bfloat16 it wins up to 8 rows (0.12 ms for one and 0.5 for
# eight against 0.7 in pieces), in float32 never.
_FUSED_ROWS = 8


class QuantisedLinear:
    """`x @ weight.T + bias`, in the dtype of `x`: float32, bfloat16 or float16."""

    def __init__(self, weight: RowScaledWeight | Int4Weight, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.nbytes = _nbytes(weight) + (0 if bias is None else bias.nbytes)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [T, out], for `x` [T, in]."""
        if kernels_in_use(x.device.type) == "triton":
            return _triton_product(x, self._weight, self.bias)
        if isinstance(self._weight, Int4Weight):
            return _in_pieces(x, self._weight.values, self._int4_piece, self.bias)
        return self._row_scaled_product(x, self._weight)

    def _row_scaled_product(self, x: torch.Tensor, weight: RowScaledWeight) -> torch.Tensor:
        scales = weight.scales.to(x.dtype)
        fused = weight.values.dtype == torch.int8 and x.dtype == torch.bfloat16 and x.device.type == "cpu"
        if fused and len(x) <= _FUSED_ROWS:
            out = torch._weight_int8pack_mm(x, weight.values, scales)
        else:
            out = _in_pieces(x, weight.values, lambda first, last: weight.values[first:last].to(x.dtype), None).mul_(scales)
        return out if self.bias is None else out.add_(self.bias)

    def _int4_piece(self, first: int, last: int) -> torch.Tensor:
        weight = self._weight
        assert isinstance(weight, Int4Weight)
        return Int4Weight(weight.values[first:last], weight.scales[first:last], weight.minimums[first:last]).dequantise()


def projection_maker(quantization: str | None) -> Projector:
    """Return what makes a product of a float weight [out, in] and a bias, under one of `QUANTIZATIONS` or none."""
    makers: dict[str | None, Projector] = {None: plain, "int8": _int8, "int4": _int4, "fp8": _fp8}
    return makers[quantization]


def head_maker(quantization: str | None) -> Projector:
    """Return what makes the product with the vocabulary, whose errors show in every token: 8 bits at least, or whole."""
    return projection_maker("int8" if quantization in ("int8", "int4") else None)


def check_supported(quantization: str | None, device: torch.device) -> None:
    """Raise `UnsupportedModel` if this device can't run the quantisation."""
    if quantization != "fp8":
        return
    if device.type != "cuda":
        raise UnsupportedModel("quantization 'fp8' needs a GPU that multiplies float8; use int8 or int4 on a CPU")
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
        raise UnsupportedModel(
            f"quantization 'fp8' needs a GPU of compute capability {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]} or later, this "
            f"one has {found[0]}.{found[1]}; use int8 or int4"
        )


def plain(weight: AnyWeight, bias: torch.Tensor | None = None) -> Projection:
    """Return the product with a weight as it is, where it lives: by the native CPU kernels if they are in use."""
    if _goes_native(weight):
        return PackedLinear(weight, bias)
    if isinstance(weight, torch.Tensor):
        return Linear(weight, bias)
    assert not isinstance(weight, Int8GroupWeight), "kept as stored for the native kernels alone"
    return QuantisedLinear(weight, bias)


def _goes_native(weight: AnyWeight) -> bool:
    where = weight.device if isinstance(weight, torch.Tensor) else weight.values.device
    return where.type == "cpu" and packs(weight) and in_use()


def _int8(weight: AnyWeight, bias: torch.Tensor | None) -> Projection:
    return plain(quantise_rows(_whole(weight), torch.int8), bias)


def _int4(weight: AnyWeight, bias: torch.Tensor | None) -> Projection:
    whole = _whole(weight)
    if whole.shape[1] % _GROUP:
        raise UnsupportedModel(f"quantization 'int4' needs widths that are multiples of {_GROUP}, not {whole.shape[1]}")
    exact = quantise_int4(whole, _GROUP)
    # 16 bits each for scale and minimum: with them a weight takes 5 bits
    return plain(Int4Weight(exact.values, exact.scales.half(), exact.minimums.half()), bias)


def _fp8(weight: AnyWeight, bias: torch.Tensor | None) -> Projection:
    return QuantisedLinear(quantise_rows(_whole(weight), torch.float8_e4m3fn), bias)


def _whole(weight: AnyWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantise()


def _triton_product(x: torch.Tensor, weight: RowScaledWeight | Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    from paceline_kernels.triton_ops.quantised_matmul import int4_matmul, row_scaled_matmul

    if isinstance(weight, Int4Weight):
        return int4_matmul(x, weight, bias)
    return row_scaled_matmul(x, weight, bias)


def _in_pieces(
    x: torch.Tensor, values: torch.Tensor, piece: Callable[[int, int], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x @ weight.T + bias` with a few rows `[first, last)` of the weight at a time, as `piece` gives them."""
    rows = max(_PIECE_BYTES // (x.shape[1] * x.element_size()), 16)
    out = x.new_empty(len(x), len(values))
    for first in range(0, len(values), rows):
        part = piece(first, first + rows).to(x.dtype)
        out[:, first : first + rows] = linear(x, part, None if bias is None else bias[first : first + rows])
    return out


def _nbytes(weight: RowScaledWeight | Int4Weight) -> int:
    if isinstance(weight, Int4Weight):
        return weight.values.nbytes + weight.scales.nbytes + weight.minimums.nbytes
    return weight.values.nbytes + weight.scales.nbytes
