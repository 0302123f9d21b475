"""What this machine can do at most: products of large matrices in each type, and reading memory. By torch, some seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIDE = 2048
READ_BYTES = 1 << 30  # more than any cache
TRIES = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """Operations/s by type of number (a multiply and an add are two), and bytes/s read."""

    operations: dict[str, float]
    read: float

    def best_of(self, other: Roofline) -> Roofline:
        """Return the higher limit of two measurements each: what disturbs one only ever makes it lower."""
        rates = {name: max(rate, other.operations[name]) for name, rate in self.operations.items()}
        return Roofline(rates, max(self.read, other.read))

    def seconds(self, precision: str, operations: float, bytes_read: float) -> float:
        """Return the least time for so much arithmetic and so many bytes, whichever takes longer."""
        return max(operations / self.operations[precision], bytes_read / self.read)


def measure() -> Roofline:
    """Measure with as many threads as this process has CPUs."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    work = 2 * SIDE**3
    rates = {name: work / _best(_product(name)) for name in ("fp32", "bf16", "int8")}
    data = torch.ones(READ_BYTES // 4)
    return Roofline(rates, READ_BYTES / _best(data.sum))


def _product(name: str) -> Callable[[], object]:
    if name == "int8":
        a, b = (torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    x, y = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
    return lambda: x @ y


def _best(action: Callable[[], object]) -> float:
    """Return the seconds of the quickest of some tries, after one that warms up."""
    action()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)
