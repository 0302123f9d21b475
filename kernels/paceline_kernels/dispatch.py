"""How an op finds its implementation: by the device type of its first tensor, with the torch reference as the fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Op"]


class Op:
    """One op: a torch `reference` that defines its meaning on any device and dtype, and faster versions per device type."""

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
        """Return the implementation for tensors on `device_type`."""
        return self._by_device.get(device_type, self.reference)

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the op where its first tensor lives."""
        return self.on(first.device.type)(first, *args, **kwargs)
