"""One step as whole numbers in one buffer: what a device needs is copied to it at once, and read there as views.

Everything is int32 or is stored as such. Each part begins at a multiple of 16 bytes: Triton compiles one kernel for pointers
that are aligned so and another for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.triton_ops.attention_plan import ITEM_FIELDS, REDUCTION_FIELDS, HostTiles

__all__ = ["Packed", "PackedViews", "StepArrays", "TileSizes", "pack", "words_of"]

_ALIGNED_WORDS = 4  # 16 bytes
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The sizes of a `TileSet`."""

    block_m: int
    items: int
    reductions: int
    parts: int


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step of T tokens in N sequences, laid out on the host.

    `ids` [T] are token ids, or -1 - i where the id is the i-th of those that the step before sampled. `slots` [T] are
    block × block size + offset. `extra` holds further arrays of 4- or 8-byte numbers by name.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints  # [N + 1]
    contexts: Ints  # [N]
    table_rows: Ints  # [N]
    tiles: tuple[HostTiles, ...]
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays in the order in which they are stored: those of a fixed size for a bucket of decodes first."""
        for name in ("ids", "positions", "slots", "query_starts", "contexts", "table_rows"):
            yield name, getattr(self, name)
        for number, each in enumerate(self.tiles):
            yield f"items{number}", each.items
            yield f"reductions{number}", each.reductions
        yield from self.extra.items()


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed step: where each array is (`name`, dtype, first word, numbers) in `words` words of the buffer."""

    parts: tuple[tuple[str, str, int, int], ...]
    tiles: tuple[TileSizes, ...]
    words: int


def words_of(arrays: StepArrays) -> int:
    """Return the words that the packed step takes."""
    return sum(_aligned(array.nbytes // 4) for _, array in arrays.named())


def pack(arrays: StepArrays, buffer: torch.Tensor) -> Packed:
    """Write the step into `buffer` [words] int32 on the host and return where everything is."""
    flat = buffer.numpy()
    parts, at = [], 0
    for name, array in arrays.named():
        count = array.nbytes // 4
        flat[at : at + count] = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        parts.append((name, array.dtype.name, at, array.size))
        at += _aligned(count)
    sizes = tuple(TileSizes(t.block_m, len(t.items), len(t.reductions), t.num_parts) for t in arrays.tiles)
    return Packed(tuple(parts), sizes, at)


class PackedViews:
    """The arrays of a packed step as tensors: views of `buffer` [words] int32, on any device."""

    def __init__(self, packed: Packed, buffer: torch.Tensor) -> None:
        self._views = {name: _view(buffer, dtype, at, count) for name, dtype, at, count in packed.parts}
        self.tiles = packed.tiles

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Return an array that may be absent."""
        return self._views.get(name)

    def items(self, number: int) -> torch.Tensor:
        """Return the items [W, 5] of a tile set."""
        return self[f"items{number}"].view(-1, ITEM_FIELDS)

    def reductions(self, number: int) -> torch.Tensor:
        """Return the reductions [R, 4] of a tile set."""
        return self[f"reductions{number}"].view(-1, REDUCTION_FIELDS)


def _view(buffer: torch.Tensor, dtype: str, at: int, count: int) -> torch.Tensor:
    target: torch.dtype = getattr(torch, dtype)
    return buffer[at : at + count * target.itemsize // 4].view(target)


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS
