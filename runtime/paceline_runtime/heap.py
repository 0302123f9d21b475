"""Gives memory back to the system that the C library keeps for later."""

from __future__ import annotations

import ctypes

__all__ = ["give_back_heap"]


def give_back_heap() -> None:
    """Return free pages to the system, where the C library can (glibc).

    Loading leaves holes between what is kept: after quantising SmolLM2 to 135 MB the process held 516 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
