"""Drafts by prompt lookup: what followed the last few tokens when they last occurred will perhaps follow again.

Saxena, "Prompt Lookup Decoding" (2023). It costs no second model, and pays where an answer repeats its prompt or itself:
summaries, edits of code, extraction, lists.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["PromptLookup"]

# Tokens that must recur, the longest match first: what followed three equal tokens is mostly right, and two find something
# twice as often. One token recurs everywhere.
_NGRAMS = (3, 2)
# Bytes looked back through, which is 16,384 tokens: a search that finds nothing there takes 30 µs.
_WINDOW = 65_536
_WIDTH = array("i").itemsize


class PromptLookup:
    """Proposes what may come next in the sequences that it is asked about. Deterministic; keeps four bytes per token."""

    def __init__(self) -> None:
        self._texts: dict[int, bytearray] = {}

    def propose(self, seq_id: int, prompt: Sequence[int], generated: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow `prompt` and `generated`, both of which only ever grow."""
        text = self._texts.get(seq_id)
        if text is None:
            text = self._texts[seq_id] = bytearray(array("i", prompt).tobytes())
        text += array("i", generated[len(text) // _WIDTH - len(prompt) :]).tobytes()
        for size in _NGRAMS:
            if (place := _last_place(text, size)) >= 0:
                return _continuation(text, place + size * _WIDTH, most)
        return ()

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._texts.pop(seq_id, None)


def _last_place(text: bytearray, size: int) -> int:
    """Return where the last `size` tokens of `text` occurred last before their end, in bytes; -1: nowhere."""
    length = size * _WIDTH
    if len(text) <= length:
        return -1
    pattern, first = bytes(text[-length:]), max(0, len(text) - _WINDOW) // _WIDTH * _WIDTH
    end = len(text) - _WIDTH  # an occurrence may overlap the end itself, but isn't it
    while (place := text.rfind(pattern, first, end)) >= 0 and place % _WIDTH:
        end = place + length - 1  # bytes of two tokens that look like one
    return place


def _continuation(text: bytearray, place: int, most: int) -> tuple[int, ...]:
    """Return `most` tokens from `place` on; past the end what was proposed itself goes on, as in a text that repeats."""
    found = list(array("i", bytes(text[place : place + most * _WIDTH])))
    period = len(found)
    while len(found) < most:
        found.append(found[-period])
    return tuple(found)
