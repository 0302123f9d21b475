"""How an op finds its implementation: by the device type of its first tensor, with the torch reference as the fallback."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["KERNELS", "Op", "chosen_by_use", "kernels_in_use", "use_kernels"]

# `auto`: by the device of the tensors; `triton`: the GPU's kernels wherever the tensors are, which on a CPU needs Triton's
# interpreter (TRITON_INTERPRET=1) and is for tests; `native`: the compiled CPU kernels, which `auto` takes on a CPU where
# they are built (`cpu.native`); `torch`: neither, for comparisons and GPUs that Triton doesn't know.
KERNELS = ("auto", "triton", "native", "torch")
_kernels: ContextVar[str] = ContextVar("kernels", default="auto")


@contextlib.contextmanager
def use_kernels(choice: str) -> Iterator[None]:
    """Choose the implementations of every op for what runs within, in this thread: one of `KERNELS`."""
    assert choice in KERNELS, f"kernels are one of {', '.join(KERNELS)}, not {choice!r}"
    token = _kernels.set(choice)
    try:
        yield
    finally:
        _kernels.reset(token)


def chosen_by_use() -> str:
    """Return what `use_kernels` chose here: one of `KERNELS`."""
    return _kernels.get()


def kernels_in_use(device_type: str) -> str:
    """Return `triton` or `torch`: which kernels ops use here for tensors on `device_type`."""
    choice = _kernels.get()
    if choice == "auto":
        return "triton" if device_type == "cuda" else "torch"
    return "torch" if choice == "native" else choice


class Op:
    """One op: a torch `reference` that defines its meaning on any device and dtype, and faster versions per device type.

    The version for `cuda` is the one in Triton; ROCm's devices are called `cuda` too.
    """

    def __init__(self, reference: Callable[..., Any]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._by_device: dict[str, Callable[..., Any]] = {}

    def register(self, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function the implementation on `device_type` (`cpu`, `cuda`)."""

        def decorate(implementation: Callable[..., Any]) -> Callable[..., Any]:
            assert device_type not in self._by_device, f"{self.reference.__name__} on {device_type} is registered twice"
            self._by_device[device_type] = implementation
            return implementation

        return decorate

    def on(self, device_type: str) -> Callable[..., Any]:
        """Return the implementation for tensors on `device_type`, by `use_kernels`' choice."""
        if kernels_in_use(device_type) == "triton":
            return self._by_device.get("cuda", self.reference)
        return self._by_device.get("cpu", self.reference) if device_type == "cpu" else self.reference

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the op where its first tensor lives."""
        return self.on(first.device.type)(first, *args, **kwargs)
