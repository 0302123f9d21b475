"""Read a GGUF file's header: metadata and the table of tensors, with every count and length bounded. No torch here.

The `gguf` library's reader believes the file: a claimed array of 2^60 items keeps it busy for years. This one
walks the header once; block sizes and dequantisation stay the library's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline_runtime.model_errors import ModelFormatError

__all__ = ["GgufFile", "GgufTensor", "read_gguf"]

T = TypeVar("T")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Far above any real model (Llama 3.1 405B: 1,138 tensors, 128,256 tokens, 280,147 merges) and low enough to fail fast.
_MAX_TENSORS = 65_536
_MAX_KEYS = 65_536
_MAX_ITEMS = 4_194_304
_MAX_STRING = 8 * 1024 * 1024
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**40


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `shape` is in row-major order (as in torch), `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF header: where it came from, its metadata, its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the metadata value of `key`. Raises `ModelFormatError` if it is absent (without default) or no `kind`."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.path}: the metadata lacks {key}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFormatError(f"{self.path}: {key} must be {kind.__name__}, got {type(value).__name__}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the header of `path`. Raises `ModelFormatError` (one line) if it isn't a whole, sane GGUF file."""
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:  # magic, version, two counts
            raise ModelFormatError(f"{path}: not a GGUF file (shorter than a header)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()


class _Reader:
    """A cursor over the header; every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != _MAGIC:
            raise self._error("not a GGUF file (wrong magic)")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self._error(f"GGUF version {version} isn't supported, only {_VERSIONS}")
        num_tensors = self._count("Q", _MAX_TENSORS, "tensors")
        num_keys = self._count("Q", _MAX_KEYS, "metadata keys")
        metadata = self._metadata(num_keys)
        tensors = self._tensors(num_tensors, metadata.get("general.alignment", 32))
        return GgufFile(self._path, metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self._error(f"the metadata key {key!r} comes twice")
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or not 1 <= alignment <= 65_536 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, got {alignment!r}")
        rows = [self._tensor_row() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, type_id, start + offset) for name, shape, type_id, offset in rows}
        if len(tensors) != count:
            raise self._error("a tensor's name comes twice")
        for tensor in tensors.values():
            if tensor.offset > len(self._data):
                raise self._error(f"truncated: tensor {tensor.name!r} starts behind the file's end")
        return tensors

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = tuple(self._scalar("Q") for _ in range(self._count("I", _MAX_DIMS, "dimensions")))
        if not dims or 0 in dims or math.prod(dims) > _MAX_ELEMENTS:
            raise self._error(f"tensor {name!r} claims the shape {dims}")
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise self._error(f"unknown metadata type {kind}")

    def _array(self) -> list[Any]:
        kind = self._scalar("I")
        count = self._count("Q", _MAX_ITEMS, "array items")
        if kind in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * struct.calcsize(_SCALARS[kind]))))
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        raise self._error(f"arrays of metadata type {kind} aren't supported")

    def _string(self) -> str:
        raw = self._take(self._count("Q", _MAX_STRING, "characters"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"a text in the header isn't UTF-8 (at byte {self._at - len(raw)})") from None

    def _count(self, code: str, bound: int, what: str) -> int:
        count: int = self._scalar(code)
        if count > bound:
            raise self._error(f"claims {count} {what}, more than {bound}")
        return count

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._error("truncated: the header goes on behind the file's end")
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path}: {message}")
