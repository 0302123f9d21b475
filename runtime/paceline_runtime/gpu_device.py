"""What the GPU path needs of a device: memory for copies that don't wait, marks in its queue of work, graphs, its memory.

The real one is for NVIDIA and AMD; on a CPU another one does the same at once, so that everything around it
can be tested without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Device", "Graph", "Mark", "device_for"]

Compute = Callable[[], torch.Tensor]


class Mark(Protocol):
    """A place in the device's queue of work."""

    def wait(self) -> None:
        """Return when the device has come past it."""

    def passed(self) -> bool:
        """Whether the device has come past it."""

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time between two marks that it has passed."""


class Graph(Protocol):
    """A computation recorded once, which is run again over the same memory."""

    output: torch.Tensor

    def replay(self) -> None:
        """Queue it."""


class Device(Protocol):
    """A device that works through a queue beside the host."""

    where: torch.device
    programs: int  # of a kernel that keep the device busy

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device can read and write without the host's help."""

    def mark(self) -> Mark:
        """Put a mark at the end of the queue."""

    def record(self, compute: Compute) -> Graph:
        """Run `compute` once to warm it up, and record it. Graphs share one pool: record the largest first."""

    def forget_graphs(self) -> None:
        """Give back the graphs' pool; none of them is used any more."""

    def free_memory(self) -> tuple[int, int]:
        """Return the device's free and whole memory in bytes, after giving back what is cached."""

    def peak(self, compute: Compute) -> int:
        """Return how many bytes `compute` takes at its peak, beyond what was taken before."""


class _CudaDevice:
    """The GPU that this process uses."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        # two on each multiprocessor, so that one computes while the other waits for memory
        self.programs = 2 * torch.cuda.get_device_properties(where).multi_processor_count
        self._pool: Any = None

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        return _CudaMark()

    def record(self, compute: Compute) -> Graph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        compute()  # compiles kernels and sets libraries up, which a recording can't
        torch.cuda.synchronize(self.where)
        graph = torch.cuda.CUDAGraph()
        # other threads may ask the driver for something meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        return _CudaGraph(graph, output)

    def forget_graphs(self) -> None:
        torch.cuda.synchronize(self.where)
        self._pool = None

    def free_memory(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.where)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.where)

    def peak(self, compute: Compute) -> int:
        compute()  # libraries' workspaces are taken once, and stay
        torch.cuda.synchronize(self.where)
        before = torch.cuda.memory_allocated(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        compute()
        torch.cuda.synchronize(self.where)
        return torch.cuda.max_memory_allocated(self.where) - before


class _CudaMark:
    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1000


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class _HostDevice:
    """A CPU: everything is done when it is queued. Its graphs compute again, into the memory of their first result."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.programs = 2  # the interpreter runs them one by one

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def mark(self) -> Mark:
        return _HostMark()

    def record(self, compute: Compute) -> Graph:
        return _HostGraph(compute)

    def forget_graphs(self) -> None:
        pass

    def free_memory(self) -> tuple[int, int]:
        raise NotImplementedError("a CPU's memory is the container's: see pool_sizes.py")

    def peak(self, compute: Compute) -> int:
        raise NotImplementedError("a CPU's peak is estimated: see pool_sizes.py")


class _HostMark:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self._time - earlier._time


class _HostGraph:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.output = compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def device_for(where: torch.device) -> Device:
    """Return the device behind a torch device."""
    return _CudaDevice(where) if where.type == "cuda" else _HostDevice()
