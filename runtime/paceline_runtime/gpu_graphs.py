"""Which sizes of decode steps are recorded as graphs, and which graph a step takes.

Launching a decode's kernels one by one takes the host longer than the GPU needs to run them; replaying a recording takes it
microseconds. A recording has a fixed size, so a step is padded to the next larger one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from paceline_runtime.gpu_device import Device, Graph

__all__ = ["DecodeGraphs", "bucket_sizes"]

# Padding costs a row of every product, which is nothing while the weights' bytes take the time; each graph costs about
# 100 kB per layer and, at start, two runs. Up to 16 sequences a doubling costs at most one tile of 16 rows.
_STEPS = ((16, 0), (64, 16), (256, 32), (1 << 31, 128))


def bucket_sizes(limit: int) -> tuple[int, ...]:
    """Return the sizes for up to `limit` sequences, rising: 1, 2, 4, 8, 16, then every 16, 32, 128; `limit` is last."""
    sizes = [1]
    for end, step in _STEPS:
        while sizes[-1] < min(end, limit):
            sizes.append(min(sizes[-1] + (step or sizes[-1]), limit))
    return tuple(sizes)


class DecodeGraphs:
    """The recorded decode steps. `compute(size)` computes a step of `size` sequences out of memory that stays in place.

    What `record` didn't record is recorded when it is first needed.
    """

    def __init__(self, device: Device, sizes: tuple[int, ...], compute: Callable[[int], torch.Tensor]) -> None:
        self._device = device
        self._sizes = sizes
        self._compute = compute
        self._graphs: dict[int, Graph] = {}

    def bucket(self, sequences: int) -> int | None:
        """Return the size that a step of so many sequences is padded to; None if it is launched plainly."""
        at = bisect.bisect_left(self._sizes, sequences)
        return self._sizes[at] if at < len(self._sizes) else None

    def record(self) -> None:
        """Record every size, the largest first: the smaller ones then fit into the memory that it leaves behind."""
        for size in reversed(self._sizes):
            self._record(size)

    def forget(self) -> None:
        """Drop every recording, as before memory that they use goes away."""
        if self._graphs:
            self._graphs = {}
            self._device.forget_graphs()

    def replay(self, size: int) -> torch.Tensor:
        """Queue the step of `size` sequences and return its output, valid until the next replay of any size."""
        graph = self._graphs.get(size) or self._record(size)
        graph.replay()
        return graph.output

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes that are recorded now, in the order of recording."""
        return tuple(self._graphs)

    def _record(self, size: int) -> Graph:
        graph = self._graphs[size] = self._device.record(lambda: self._compute(size))
        return graph
