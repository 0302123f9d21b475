"""Causal masks of chunks: corners of one mask for each window, which grows."""

from __future__ import annotations

import torch

__all__ = ["MASK_ROWS", "CausalMasks"]

# Rows of the causal mask that chunks share: 512 rows of 8192 positions in float32 are 16 MB.
MASK_ROWS = 512


class CausalMasks:
    """Masks of `dtype` on `device`: 0 where a row attends to a position, -inf where it doesn't."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._known: dict[int | None, torch.Tensor] = {}

    def tail(self, rows: int, context: int, window: int | None) -> torch.Tensor:
        """Return the mask [rows, context] of the last `rows` (at most `MASK_ROWS`) of `context` positions."""
        known = self._known.get(window)
        if known is None or known.shape[1] < context:
            width = max(1 << (context - 1).bit_length(), MASK_ROWS)
            # how far a column's position lies behind its row's
            behind = torch.arange(width - MASK_ROWS, width)[:, None] - torch.arange(width)[None]
            hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
            known = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf")).to(self._device)
            self._known[window] = known
        return known[MASK_ROWS - rows :, known.shape[1] - context :]
