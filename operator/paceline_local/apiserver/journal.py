"""Durability: an append-only file of one JSON line per change, compacted at start and when it has grown.

Each line reaches the operating system before its change is acknowledged, so killing the process loses nothing. A torn last
line (the write that was cut off was never acknowledged) is dropped. Losing power may lose the newest lines: no fsync.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline_local.apiserver.errors import StateError
from paceline_local.apiserver.objects import Json

__all__ = ["Journal", "Key"]

Key = tuple[str, str, str]  # storage name, namespace ("" if cluster scoped), name

_COMPACT_BYTES = 32 << 20  # a local fleet's live objects are < 1 MiB; leases and heartbeats write ~1 kB each
_GROWTH = 2  # and never before the file has doubled: with much live data every write would compact otherwise


class Journal:
    """The file `journal.jsonl` under the state folder. Lines: `{"rev":…, "key":[…], "object":{…} | null}`."""

    def __init__(self, state: Path) -> None:
        self._path = state / "journal.jsonl"
        self._fd = -1
        self._size = 0
        self._limit = _COMPACT_BYTES

    def load(self) -> tuple[int, dict[Key, Json]]:
        """Return the last revision and the live objects, then compact the file and open it for writing."""
        revision, objects = 0, dict[Key, Json]()
        for line in self._complete_lines():
            try:
                entry = json.loads(line)
                revision = max(revision, entry["rev"])
                key, value = entry.get("key"), entry.get("object")
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{self._path} is damaged ({error}); move it away to start empty") from error
            if key is not None and value is None:
                objects.pop(tuple(key), None)
            elif key is not None:
                objects[tuple(key)] = value
        self.compact(revision, objects.items())
        return revision, objects

    def _complete_lines(self) -> Iterable[bytes]:
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().split(b"\n")
        return [line for line in lines[:-1] if line]  # what follows the last newline is empty or torn

    def append(self, revision: int, key: Key, value: Json | None) -> None:
        """Write one change through to the operating system; a write that fails (disk full) leaves no torn line behind."""
        try:
            self._size += _write(self._fd, _line({"rev": revision, "key": key, "object": value}))
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise

    @property
    def bloated(self) -> bool:
        """Tell whether the file should be compacted."""
        return self._size > self._limit

    def compact(self, revision: int, objects: Iterable[tuple[Key, Json]]) -> None:
        """Replace the file by one that holds only `objects`, atomically."""
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            size = _write(fd, _line({"rev": revision}))
            for key, value in objects:
                size += _write(fd, _line({"rev": revision, "key": key, "object": value}))
            os.fsync(fd)
            fresh.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._size = fd, size
        self._limit = max(_COMPACT_BYTES, _GROWTH * size)

    def defer(self) -> None:
        """Give a compaction that failed (disk full) another try only after more growth: the file is whole as it is."""
        self._limit += _COMPACT_BYTES

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _write(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
