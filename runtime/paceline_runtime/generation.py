"""One generation of the API: a live sequence's tokens turned into text, with every way it can end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from paceline_core.request import FinishReason
from paceline_runtime.api_errors import ApiError, invalid, unavailable
from paceline_runtime.engine_client import EngineClient
from paceline_runtime.messages import SequenceEnded
from paceline_runtime.sequence import LiveSequence
from paceline_runtime.step_result import TokenLogprobs
from paceline_runtime.text_stream import TextStream

__all__ = ["Answer", "Echo", "Generation", "Piece", "ShownToken", "pieces_of"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of the text, where its own text begins in it, and its log-probabilities; the first of a prompt has none."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the answer begins with: its text, where in it each token begins, and whether it is `only` that."""

    text: str
    offsets: tuple[int, ...] = ()
    only: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole result. `tokens` only if log-probabilities were asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens: tuple[ShownToken, ...] = ()


class Piece(msgspec.Struct, frozen=True):  # made for each token: a dataclass takes five times as long
    """Some text of generation `index`, or its end, which has a reason and no text; `tokens` as in `Answer`."""

    index: int
    text: str
    finish_reason: str | None = None
    tokens: tuple[ShownToken, ...] = ()


class Generation:
    """Reads one sequence. Whoever has one must `close` it: that frees the engine's slot if the client is gone."""

    def __init__(self, client: EngineClient, sequence: LiveSequence, text: TextStream, echo: Echo | None = None) -> None:
        self._client = client
        self._sequence = sequence
        self._text = text
        self._echo = echo
        self._before = "" if echo is None else echo.text  # what the first text begins with
        self._told: int | None = None  # tokens of the text that `take_tokens` gave; None: the prompt's are due first

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once the text has ended."""
        if self._text.finish_reason is None:
            return None
        return FinishReason.LENGTH.value if self._silent else self._text.finish_reason.value

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._sequence.submission.tokens)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, the stop token included."""
        return 0 if self._silent else len(self._text.token_ids)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; None until the engine has said so."""
        return None if self._sequence.ended is None else self._sequence.ended.cached_len

    @property
    def embedding(self) -> bytes:
        """The prompt's embedding (float32), after the end, if it was asked for."""
        return self._sequence.prompt.embedding

    @property
    def _silent(self) -> bool:
        return self._echo is not None and self._echo.only

    async def read(self) -> str | None:
        """Wait for text and return it, None after the end. Raises `ApiError` or `EngineDied`."""
        while self._text.finish_reason is None:
            if piece := self._push(await self._take()):
                return piece
        return None

    async def pieces(self) -> AsyncIterator[str]:
        """Yield text as it comes, to its end. Raises what `read` does."""
        while (piece := await self.read()) is not None:
            yield piece

    def _push(self, tokens: list[int]) -> str:
        """Return the text that tokens add, or their absence: then the sequence has ended."""
        piece = self._text.push(tokens)
        if self._text.stopped_by_text:
            self._client.stop(self._sequence, FinishReason.STOP)
        if self._text.finish_reason is None and self._sequence.ended is not None:
            piece += self._text.finish(self._normal_end(self._sequence.ended))
        before, self._before = self._before, ""
        return before + ("" if self._silent else piece)

    def take_tokens(self) -> tuple[ShownToken, ...]:
        """Return the tokens of the text that was shown since the last call, if log-probabilities were asked for."""
        if self._sequence.submission.params.logprobs is None:
            return ()
        before = self._prompt_tokens() if self._told is None else ()
        first, last = self._told or 0, 0 if self._silent else self._text.shown_tokens
        self._told = last
        shift = 0 if self._echo is None else len(self._echo.text)
        ids, offsets, logprobs = self._text.token_ids, self._text.offsets, self._sequence.logprobs
        return (*before, *(ShownToken(ids[i], shift + offsets[i], logprobs[i]) for i in range(first, last)))

    def _prompt_tokens(self) -> tuple[ShownToken, ...]:
        if self._echo is None:
            return ()
        ids, logprobs = self._sequence.submission.tokens, (None, *self._sequence.prompt.logprobs)
        return tuple(ShownToken(*token) for token in zip(ids, self._echo.offsets, logprobs, strict=True))

    async def whole(self) -> Answer:
        """Return the result when the engine releases it: static and dynamic batching hold it until their batch ends."""
        text = "".join([piece async for piece in self.pieces()])
        while self._sequence.ended is None:
            await self._sequence.take()
        reason, cached = self.finish_reason, self._sequence.ended.cached_len
        assert reason is not None
        return Answer(text, reason, self.prompt_tokens, self.completion_tokens, cached, self.take_tokens())

    def close(self, cause: str = "client") -> None:
        """Tell the engine that nobody reads any more, if it still works on it; `cause` is why, in a word."""
        if self._sequence.ended is None and self._text.finish_reason is None:
            self._client.stop(self._sequence, FinishReason.ABORT, cause)

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


def pieces_of(generations: Sequence[Generation]) -> AsyncIterator[Piece]:
    """Yield the pieces of some generations as they come, each to its end. Raises what the first of them raises."""
    return _indexed(0, generations[0]) if len(generations) == 1 else _merged(generations)


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[Piece]:
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
    while (text := await generation.read()) is not None:
        yield Piece(index, text, tokens=generation.take_tokens())
    yield Piece(index, "", generation.finish_reason, generation.take_tokens())


async def _read(index: int, generation: Generation, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async for piece in _indexed(index, generation):
            await queue.put(piece)
    except Exception as error:  # noqa: BLE001  # handed over to who reads the queue
        await queue.put(error)


def _deadline_passed() -> ApiError:
    return ApiError(504, "the first token can't come (or didn't) within X-Request-Timeout", code="deadline_exceeded")
