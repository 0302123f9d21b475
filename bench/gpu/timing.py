"""Times on a device: medians of many runs with a cold cache on a GPU, one run on a CPU (where they mean nothing)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], device: torch.device, *, budget: float = 0.05) -> float:
    """Return the median seconds of one call; `budget` is about how long all calls together may take."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    from triton.testing import do_bench  # clears the L2 cache before each call

    return float(do_bench(run, warmup=10, rep=int(budget * 1000), return_mode="median")) / 1000


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(size: int, device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy of `size` bytes: the ceiling for what memory bounds."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, budget=0.2)


def product_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a square product of random numbers: the ceiling for what arithmetic bounds."""
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, device, budget=0.2)
