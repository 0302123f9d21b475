"""Matrix products with fixed weights, packed once for the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Linear"]

# Rows that oneDNN packs for. Packing for 8 to 64 rows gives the same speed at every batch size, packing for 1 is slow at 8;
# measured on one AVX-512 core with a 576 × 3072 float32 weight: 8 rows take 0.43 ms packed and 0.81 ms plain.
_PACK_ROWS = 16


class Linear:
    """`x @ weight.T + bias` with `weight` [out, in] and optional `bias` [out]; float32, bfloat16 or float16.

    On a CPU the weight is repacked for oneDNN where this build of torch can do it, and the plain copy isn't kept.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [T, out], for `x` [T, in]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)


def _can_pack(weight: torch.Tensor) -> bool:
    """Tell whether oneDNN takes the weight: the private ops exist, and 16-bit products have hardware behind them."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
