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
from paceline_runtime.logprob_replies import chat_logprobs, completion_logprobs
from paceline_runtime.text_stream import Tokenizer
from paceline_runtime.tool_parser import CallDelta, Delta, ToolParser

__all__ = ["ChatReply", "CompletionReply", "Reply", "event_stream"]

_DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """The shape of one kind of answer, with `n` choices for each prompt; `include_usage` is about streams."""

    id: str
    model: str
    tokenizer: Tokenizer
    n: int = 1
    include_usage: bool = False
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _start: bytes = field(init=False, repr=False)  # of every event: encoded once, not for each token
    _frames: dict[int, tuple[bytes, bytes]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        head = msgspec.json.encode(self._head(chunk=True))
        object.__setattr__(self, "_start", b"data: " + head[:-1] + b',"choices":')  # frozen, but not made yet

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

    def pieces(self, piece: Piece) -> list[bytes]:
        """Return the events of a piece of text, or of the end; none if all of it is held back."""
        if piece.text and piece.finish_reason is None and self._plain:
            before, after = self._frames.get(piece.index) or self._frame(piece.index)
            return [before + msgspec.json.encode(piece.text) + after]
        return [self._chunk([choice]) for choice in self._piece_choices(piece)]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and after the text in every event of a choice: nearly all of it, token after token."""
        (choice,) = self._piece_choices(Piece(index, _MARK))
        before, _, after = self._chunk([choice]).rpartition(msgspec.json.encode(_MARK))
        self._frames[index] = (before, after)
        return before, after

    @property
    def _plain(self) -> bool:
        """Whether an event of some text says nothing but that text."""
        return not self.logprobs

    def usage(self, generations: Sequence[Generation]) -> bytes:
        """Return the event that ends a stream with `include_usage`."""
        firsts = generations[:: self.n]
        cached = [g.cached_tokens for g in firsts]
        known = None if None in cached else sum(c for c in cached if c is not None)
        prompt = sum(g.prompt_tokens for g in firsts)
        return self._chunk([], _usage(prompt, sum(g.completion_tokens for g in generations), known))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Return an event; with `include_usage` every one has the field, all but the last with null."""
        end = b',"usage":' + msgspec.json.encode(usage) + b"}\n\n" if self.include_usage else b"}\n\n"
        return self._start + msgspec.json.encode(choices) + end

    @abstractmethod
    def _head(self, *, chunk: bool) -> dict[str, Any]:
        """What every body and event starts with."""

    @abstractmethod
    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One choice of an answer that isn't streamed."""

    @abstractmethod
    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the events of a piece."""


class CompletionReply(Reply):
    """Answers of `/v1/completions`."""

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return self._choice(Piece(index, answer.text, answer.finish_reason, answer.tokens))

    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._choice(piece)]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = completion_logprobs(piece.tokens, self.tokenizer) if self.logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


@dataclass(frozen=True, slots=True)
class ChatReply(Reply):
    """Answers of `/v1/chat/completions`. `parsers` find tool calls, one for each choice; without tools there are none."""

    parsers: Sequence[ToolParser] = ()

    @property
    def _plain(self) -> bool:
        return not self.logprobs and not self.parsers

    def opening(self) -> list[bytes]:
        """A chat stream starts with the role."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **role}]) for index in range(self.n)]

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        deltas = self._split(Piece(index, answer.text)) + self._split(Piece(index, "", answer.finish_reason))
        text, calls = "".join(delta for delta in deltas if isinstance(delta, str)), _joined(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = self._reason(Piece(index, "", answer.finish_reason))
        logprobs = chat_logprobs(answer.tokens, self.tokenizer) if self.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The log-probabilities of a piece go with its first event, whatever becomes of its text."""
        deltas = [_delta(delta) for delta in self._split(piece)]
        if not deltas and (piece.finish_reason or piece.tokens):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if self.logprobs and piece.tokens:
            choices[0]["logprobs"] = chat_logprobs(piece.tokens, self.tokenizer)
        if piece.finish_reason:
            choices[-1]["finish_reason"] = self._reason(piece)
        return choices

    def _split(self, piece: Piece) -> list[Delta]:
        """Return the text and the calls in a piece."""
        if not self.parsers:
            return [piece.text] if piece.text else []
        parser = self.parsers[piece.index]
        return parser.push(piece.text) + (parser.finish() if piece.finish_reason else [])

    def _reason(self, piece: Piece) -> str | None:
        called = bool(self.parsers) and self.parsers[piece.index].calls > 0
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason


async def event_stream(
    reply: Reply, generations: Sequence[Generation], first: Piece, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    """Yield generations as server-sent events, those of a piece at once; `first` was waited for before the headers went out.

    An error in the middle becomes an event of its own, and no `[DONE]` follows.
    """
    try:
        yield b"".join((*reply.opening(), *reply.pieces(first)))
        async for piece in pieces:
            if events := reply.pieces(piece):
                yield b"".join(events)
        if reply.include_usage:
            yield reply.usage(generations)
        yield _DONE
    except Exception as error:  # noqa: BLE001  # headers are sent: the stream is the only place left to say it
        yield _event(error_body(to_api_error(error)))


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, str):
        return {"content": delta}
    function = {"arguments": delta.arguments}
    if not delta.id:
        return {"tool_calls": [{"index": delta.index, "function": function}]}
    head = {"index": delta.index, "id": delta.id, "type": "function"}
    return {"tool_calls": [{**head, "function": {"name": delta.name, **function}}]}


def _joined(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """Return the whole calls that some deltas make up."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if not isinstance(delta, CallDelta):
            continue
        if delta.id:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return usage if cached is None else {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
