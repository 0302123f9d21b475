"""A tokenizer without a model: one token per UTF-8 byte, and an end token. Used by the clock device."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ByteTokenizer"]

_NUM_BYTES = 256


class ByteDetokenizer:
    """Turns a growing sequence of byte tokens into text that never ends inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that `token_ids` complete; bytes of an unfinished character are kept back."""
        return self._decoder.decode(bytes(i for i in token_ids if i < _NUM_BYTES))

    def flush(self) -> str:
        """Return what was kept back (as a replacement character): nothing more will come."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Token i < 256 is byte i, token 256 ends a text."""

    vocab_size = _NUM_BYTES + 1
    max_token_chars = 1
    eos_token_ids: tuple[int, ...] = (_NUM_BYTES,)
    chat_template = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`; there is nothing to add."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid bytes become replacement characters."""
        return bytes(i for i in token_ids if i < _NUM_BYTES).decode("utf-8", errors="replace")

    def detokenizer(self) -> ByteDetokenizer:
        """Return a detokenizer for one new sequence."""
        return ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte that a token is; the end token has none."""
        return bytes([token_id]) if token_id < _NUM_BYTES else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the messages as `role: content` lines, ending with the assistant's turn if asked for."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")
