"""One generation of the API: a live sequence's tokens turned into text, with every way it can end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from paceline_core.request import FinishReason
from paceline_runtime.api_errors import ApiError, invalid, unavailable
from paceline_runtime.engine_client import EngineClient
from paceline_runtime.messages import SequenceEnded
from paceline_runtime.sequence import LiveSequence
from paceline_runtime.text_stream import TextStream

__all__ = ["Answer", "Generation", "Piece", "pieces_of"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole result."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of generation `index`, or its end, which has a reason and no text."""

    index: int
    text: str
    finish_reason: str | None = None


class Generation:
    """Reads one sequence. Whoever has one must `close` it: that frees the engine's slot if the client is gone."""

    def __init__(self, client: EngineClient, sequence: LiveSequence, text: TextStream) -> None:
        self._client = client
        self._sequence = sequence
        self._text = text

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once the text has ended."""
        reason = self._text.finish_reason
        return None if reason is None else reason.value

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._sequence.submission.tokens)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, the stop token included."""
        return len(self._text.token_ids)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield text as it comes, to its end. Raises `ApiError` or `EngineDied`."""
        while self._text.finish_reason is None:
            tokens = await self._take()
            piece = self._text.push(tokens)
            if self._text.stopped_by_text:
                self._client.stop(self._sequence, FinishReason.STOP)
            if self._text.finish_reason is None and self._sequence.ended is not None:
                piece += self._text.finish(self._normal_end(self._sequence.ended))
            if piece:
                yield piece

    async def whole(self) -> Answer:
        """Return the result when the engine releases it: static and dynamic batching hold it until their batch ends."""
        text = "".join([piece async for piece in self.pieces()])
        while self._sequence.ended is None:
            await self._sequence.take()
        reason = self.finish_reason
        assert reason is not None
        return Answer(text, reason, self.prompt_tokens, self.completion_tokens, self._sequence.ended.cached_len)

    def close(self) -> None:
        """Tell the engine that nobody reads any more, if it still works on it."""
        if self._sequence.ended is None and self._text.finish_reason is None:
            self._client.stop(self._sequence, FinishReason.ABORT)

    async def _take(self) -> list[int]:
        """Wait for tokens; for the first one at most until the request's deadline."""
        deadline = self._sequence.submission.deadline
        if deadline is None or self._sequence.first_token is not None:
            return await self._sequence.take()
        try:
            return await asyncio.wait_for(self._sequence.take(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._client.stop(self._sequence, FinishReason.REFUSED)
            raise _deadline_passed() from None

    def _normal_end(self, ended: SequenceEnded) -> FinishReason:
        """Return the reason of an end that the text did not show, if it gives an answer; else raise the error."""
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return ended.reason
        if ended.reason is FinishReason.ABORT:
            raise unavailable("the server is shutting down and ended the request", "shutting_down")
        if ended.refusal:
            raise invalid(ended.refusal, code=ended.refusal_code)
        if self._sequence.submission.deadline is None:
            text = f"the KV pool was made smaller, and the prompt's {self.prompt_tokens} tokens don't fit any more"
            raise invalid(text, "prompt", "context_length_exceeded")
        raise _deadline_passed()


async def pieces_of(generations: Sequence[Generation]) -> AsyncIterator[Piece]:
    """Yield the pieces of some generations as they come, each to its end. Raises what the first of them raises."""
    if len(generations) == 1:
        async for piece in _indexed(0, generations[0]):
            yield piece
        return
    # one place for each: a client that reads slowly gets longer pieces, not a longer queue
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(len(generations))
    readers = [asyncio.ensure_future(_read(i, generation, queue)) for i, generation in enumerate(generations)]
    try:
        left = len(readers)
        while left:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            yield news
            left -= news.finish_reason is not None
    finally:
        for reader in readers:
            reader.cancel()


async def _indexed(index: int, generation: Generation) -> AsyncIterator[Piece]:
    async for text in generation.pieces():
        yield Piece(index, text)
    yield Piece(index, "", generation.finish_reason)


async def _read(index: int, generation: Generation, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async for piece in _indexed(index, generation):
            await queue.put(piece)
    except Exception as error:  # noqa: BLE001  # handed over to who reads the queue
        await queue.put(error)


def _deadline_passed() -> ApiError:
    return ApiError(504, "the first token can't come (or didn't) within X-Request-Timeout", code="deadline_exceeded")
