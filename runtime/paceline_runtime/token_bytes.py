"""What single tokens stand for, as bytes: a token may hold a part of a character only."""

from __future__ import annotations

import re

import tokenizers

__all__ = ["TokenBytes"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece vocabularies name single bytes


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which GPT-2's vocabulary (and all byte-level ones since) writes bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._alphabet = _byte_alphabet() if "ByteLevel" in repr(backend.decoder) else None

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; nothing for an id that the tokenizer doesn't have (a padded vocabulary's)."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        text = self._backend.id_to_token(token_id) or ""
        if self._alphabet is not None:
            return bytes(self._alphabet[char] for char in text if char in self._alphabet)
        if (byte := _BYTE.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode()
