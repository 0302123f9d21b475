"""Log-probabilities in OpenAI's two shapes: lists side by side for completions, one object per token for chats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline_runtime.generation import ShownToken
from paceline_runtime.text_stream import Tokenizer

__all__ = ["chat_logprobs", "completion_logprobs"]

_IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI and vLLM say it so too


def completion_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice. The chosen token is always among the top ones."""
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprobs is None:  # the first of a prompt
            tops.append(None)
            continue
        chosen = {_text(tokenizer.token_bytes(token.id)): _finite(token.logprobs.chosen)}
        tops.append(chosen | {_text(tokenizer.token_bytes(i)): _finite(value) for i, value in token.logprobs.top})
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [None if t.logprobs is None else _finite(t.logprobs.chosen) for t in tokens],
        "tokens": [_text(tokenizer.token_bytes(token.id)) for token in tokens],
        "top_logprobs": tops,
    }


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""
    content = [
        {
            **_entry(token.id, token.logprobs.chosen, tokenizer),
            "top_logprobs": [_entry(i, value, tokenizer) for i, value in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _text(data: bytes) -> str:
    """Return a token as text; a part of a character is written as OpenAI does, so that two such parts stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _IMPOSSIBLE
