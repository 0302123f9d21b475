"""What the first rank tells the others: messages of msgpack with their length before them, through a pipe."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from paceline_runtime.gpu_inputs import Packed

__all__ = ["Head", "Message", "Resize", "Spans", "Step", "read_message", "write_message"]

_LENGTH = struct.Struct("<I")


class Spans(msgspec.Struct, tag="spans", frozen=True):
    """Compute `spans` (start, tokens, blocks) and the logits of `rows`, on a CPU."""

    spans: list[tuple[int, int, list[int]]]
    ids: list[int]
    rows: list[int]


class Step(msgspec.Struct, tag="step", frozen=True):
    """Run a packed step; see `gpu_executor.StagedStep`."""

    packed: Packed
    data: bytes
    size: int | None
    sampled: int


class Resize(msgspec.Struct, tag="resize", frozen=True):
    """Rebuild the KV pool."""

    num_blocks: int


class Head(msgspec.Struct, tag="head", frozen=True):
    """Take `rows` hidden states from the first rank and compute their logits."""

    rows: int


Message = Spans | Step | Resize | Head
_decoder = msgspec.msgpack.Decoder(Message)


def write_message(pipe: BinaryIO, kind: str, parts: dict[str, object]) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode({"type": kind, **parts})
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: BinaryIO) -> Message | None:
    """Wait for the next message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = pipe.read(_LENGTH.unpack(head)[0])
    return _decoder.decode(data)
