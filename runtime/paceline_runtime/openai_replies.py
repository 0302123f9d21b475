"""Answers in OpenAI's shapes, encoded by msgspec: a stream sends one of these for each step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline_runtime.api_errors import error_body, to_api_error
from paceline_runtime.generation import Answer, Generation

__all__ = ["ChatReply", "CompletionReply", "Reply", "event_stream"]

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """The shape of one kind of answer."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the body of an answer that isn't streamed."""
        choices = [self._whole_choice(i, answer) for i, answer in enumerate(answers)]
        usage = _usage(
            sum(a.prompt_tokens for a in answers),
            sum(a.completion_tokens for a in answers),
            sum(a.cached_tokens for a in answers),
        )
        return msgspec.json.encode({**self._head(chunk=False), "choices": choices, "usage": usage})

    def opening(self) -> list[bytes]:
        """Return the events before the first text."""
        return []

    def piece(self, text: str, finish_reason: str | None) -> bytes:
        """Return the event of a piece of text, or of the end."""
        return _event({**self._head(chunk=True), "choices": [self._piece_choice(text, finish_reason)]})

    def usage(self, generation: Generation) -> bytes:
        """Return the event that ends a stream with `include_usage`."""
        usage = _usage(generation.prompt_tokens, generation.completion_tokens, None)
        return _event({**self._head(chunk=True), "choices": [], "usage": usage})

    @abstractmethod
    def _head(self, *, chunk: bool) -> dict[str, Any]:
        """What every body and event starts with."""

    @abstractmethod
    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of an answer that isn't streamed."""

    @abstractmethod
    def _piece_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """The choice of a stream's event."""


class CompletionReply(Reply):
    """Answers of `/v1/completions`."""

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {"index": index, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}

    def _piece_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatReply(Reply):
    """Answers of `/v1/chat/completions`."""

    def opening(self) -> list[bytes]:
        """A chat stream starts with the role."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [_event({**self._head(chunk=True), "choices": [choice]})]

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}

    def _piece_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def event_stream(
    reply: Reply, generation: Generation, first: str, pieces: AsyncIterator[str], *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield a generation as server-sent events; `first` was waited for before the headers went out; it is
    empty if no text comes at all.

    An error in the middle becomes an event of its own, and no `[DONE]` follows.
    """
    try:
        for event in reply.opening():
            yield event
        if first:
            yield reply.piece(first, None)
        async for piece in pieces:
            yield reply.piece(piece, None)
        yield reply.piece("", generation.finish_reason)
        if include_usage:
            yield reply.usage(generation)
        yield _DONE
    except Exception as error:  # noqa: BLE001  # headers are sent: the stream is the only place left to say it
        yield _event(error_body(to_api_error(error)))
    finally:
        generation.close()


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return usage if cached is None else {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
