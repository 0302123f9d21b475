"""Answers in OpenAI's shapes, encoded by msgspec: a stream sends one of these for each step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline_runtime.api_errors import error_body, to_api_error
from paceline_runtime.generation import Answer, Generation, Piece

__all__ = ["ChatReply", "CompletionReply", "Reply", "event_stream"]

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """The shape of one kind of answer, with `n` choices for each prompt; `include_usage` is about streams."""

    id: str
    model: str
    n: int = 1
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the body of an answer that isn't streamed."""
        choices = [self._whole_choice(i, answer) for i, answer in enumerate(answers)]
        usage = _usage(
            sum(a.prompt_tokens for a in answers[:: self.n]),
            sum(a.completion_tokens for a in answers),
            sum(a.cached_tokens for a in answers[:: self.n]),
        )
        return msgspec.json.encode({**self._head(chunk=False), "choices": choices, "usage": usage})

    def opening(self) -> list[bytes]:
        """Return the events before the first text."""
        return []

    def piece(self, piece: Piece) -> bytes:
        """Return the event of a piece of text, or of the end."""
        return self._chunk([self._piece_choice(piece)])

    def usage(self, generations: Sequence[Generation]) -> bytes:
        """Return the event that ends a stream with `include_usage`."""
        prompt = sum(g.prompt_tokens for g in generations[:: self.n])
        return self._chunk([], _usage(prompt, sum(g.completion_tokens for g in generations), None))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Return an event; with `include_usage` every one has the field, all but the last with null."""
        event = {**self._head(chunk=True), "choices": choices}
        return _event({**event, "usage": usage} if self.include_usage else event)

    @abstractmethod
    def _head(self, *, chunk: bool) -> dict[str, Any]:
        """What every body and event starts with."""

    @abstractmethod
    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of an answer that isn't streamed."""

    @abstractmethod
    def _piece_choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a stream's event."""


class CompletionReply(Reply):
    """Answers of `/v1/completions`."""

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {"index": index, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}

    def _piece_choice(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}


class ChatReply(Reply):
    """Answers of `/v1/chat/completions`."""

    def opening(self) -> list[bytes]:
        """A chat stream starts with the role."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **role}]) for index in range(self.n)]

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}

    def _piece_choice(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": piece.finish_reason}


async def event_stream(
    reply: Reply, generations: Sequence[Generation], first: Piece, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    """Yield generations as server-sent events; `first` was waited for before the headers went out.

    An error in the middle becomes an event of its own, and no `[DONE]` follows.
    """
    try:
        for event in reply.opening():
            yield event
        yield reply.piece(first)
        async for piece in pieces:
            yield reply.piece(piece)
        if reply.include_usage:
            yield reply.usage(generations)
        yield _DONE
    except Exception as error:  # noqa: BLE001  # headers are sent: the stream is the only place left to say it
        yield _event(error_body(to_api_error(error)))


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return usage if cached is None else {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
