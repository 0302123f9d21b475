"""How launchers reach a device: they run a kernel, or, under `recording`, describe the launch so that it can be compiled.

Launchers choose tiles by `current_target()` only, so what `recording` collects with meta tensors is what a device of that
target would launch, and a build of the recorded calls covers the real thing.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from paceline_kernels.triton_ops.primitives import dot

__all__ = [
    "INTERPRETED",
    "TARGETS",
    "KernelCall",
    "Recording",
    "Target",
    "ceil_div",
    "current_target",
    "launch",
    "recording",
]

# Triton decides it when it decorates a function, so a decorated one tells.
INTERPRETED = not isinstance(dot, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture: `("cuda", 90)` or `("hip", "gfx942")`."""

    backend: str
    arch: int | str

    @property
    def is_hip(self) -> bool:
        """AMD: 64 KiB of shared memory for a workgroup, so fewer stages."""
        return self.backend == "hip"

    @property
    def has_fp8(self) -> bool:
        """Whether float8_e4m3fn exists: in hardware from sm_89 on, emulated by Triton on gfx942."""
        return self.is_hip or int(self.arch) >= 89

    @property
    def precision(self) -> str:
        """How float32 products are made: natively on AMD; on NVIDIA from three TF32 products, whose error is that of a
        float32 sum, since its own float32 units take so many registers that tiles spill by kilobytes.
        """
        return "ieee" if self.is_hip else "tf32x3"

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"


TARGETS = (Target("cuda", 80), Target("cuda", 90), Target("cuda", 100), Target("hip", "gfx942"))


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: the kernel, its arguments by name (constants included) and its options."""

    kernel: Any
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches made under `recording`, in order."""

    target: Target
    calls: list[KernelCall] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recording(target: Target) -> Iterator[Recording]:
    """Collect launches for `target` instead of running them. Tensors may be on the meta device."""
    records = Recording(target)
    token = _recording.set(records)
    try:
        yield records
    finally:
        _recording.reset(token)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *, num_warps: int = 4, num_stages: int = 1
) -> None:
    """Launch `kernel` over `grid`; a grid without programs launches nothing."""
    records = _recording.get()
    if records is not None:
        records.calls.append(KernelCall(kernel, arguments, num_warps, num_stages))
    elif 0 not in grid:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)


def current_target() -> Target:
    """Return the target recorded for, else that of this process' device; the interpreter counts as sm_90."""
    records = _recording.get()
    return records.target if records is not None else _device_target()


@functools.cache
def _device_target() -> Target:
    if INTERPRETED or not torch.cuda.is_available():
        return Target("cuda", 90)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0])
    return Target("cuda", properties.major * 10 + properties.minor)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)
