"""The paged KV cache: one tensor for all layers, rebuilt in place when the number of blocks changes."""

from __future__ import annotations

import math
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from paceline_runtime.model_config import ModelConfig

__all__ = ["KvPool", "block_bytes"]

# What `touch` takes at most. In a virtual machine a page's first write also has the host find memory: 3.3 ms per 2 MiB, so
# that prompts of 2,048 tokens (47 MB of SmolLM2's keys and values) took 0.78 s instead of 0.55 until all had been touched.
_TOUCHED_BYTES = 1 << 30


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    return config.kv_values_per_token * block_size * dtype.itemsize


class KvPool:
    """`layers[i]` is layer i's cache [num_blocks, block_size, 2, num_kv_heads, head_dim]; see `paceline_kernels`.

    It starts at zero, since attention may read unwritten slots under a mask, and 0 × nan is nan. On Linux the zeros cost no
    memory until a block is written.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._row = (2, config.num_kv_heads, config.head_dim)
        self._num_layers = config.num_layers
        self._dtype = dtype
        self._device = device
        self.layers: tuple[torch.Tensor, ...] = ()
        self.resize(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.layers[0])

    def resize(self, num_blocks: int) -> None:
        """Rebuild the pool with `num_blocks`, empty. The old one is given back first: both wouldn't fit."""
        self.layers = ()
        shape = (self._num_layers, num_blocks, self.block_size, *self._row)
        self.layers = _zeros(shape, self._dtype, self._device).unbind(0)

    def touch(self, threads: int) -> None:
        """Have the system find memory now for the first blocks, which are used first: a GiB at most, by some threads.

        Before the first step only, and on a CPU; elsewhere memory is there from the start.
        """
        if self._device.type != "cpu":
            return
        blocks = min(self.num_blocks, _TOUCHED_BYTES // sum(layer[0].nbytes for layer in self.layers))
        parts = [layer[:blocks].flatten().view(torch.uint8).numpy() for layer in self.layers]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_touch_pages, parts))


def _touch_pages(values: npt.NDArray[np.uint8]) -> None:
    values[:: mmap.PAGESIZE] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeros from calloc, whose pages cost neither time nor memory until they are written; torch writes them all:
    # 4 GB took 2.3 s (13 s on a busy machine) against 7 ms
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
