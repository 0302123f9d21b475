"""One sequence as the API process sees it: tokens arrive at any pace, its reader takes them at its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline_core.errors import PacelineError
from paceline_core.request import FinishReason
from paceline_runtime.messages import SequenceEnded
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import PromptReport, TokenLogprobs

__all__ = ["EngineDied", "LiveSequence", "Submission"]


class EngineDied(PacelineError):
    """The engine process ended in the middle of the work; it is being started again."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What is asked of the engine. `arrival` and `deadline` are `time.monotonic()`; a lower priority goes first.

    `tenant` is the name of the API key, `salt` keeps its cached blocks apart from others', and `predicted_wait` is how many
    seconds it was thought to wait for a slot. `traceparent` is the client's trace, as W3C writes it.
    """

    request_id: str
    tokens: list[int] = field(repr=False)
    params: SamplingParams
    arrival: float
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    salt: int = 0
    predicted_wait: float = 0.0
    traceparent: str = ""


class LiveSequence:
    """A mailbox of tokens with an end: exactly one of `ended` and `error` is set at last."""

    def __init__(self, seq_id: int, submission: Submission, epoch: int) -> None:
        self.seq_id = seq_id
        self.submission = submission
        self.epoch = epoch
        self.output_len = 0
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: SequenceEnded | None = None
        self.stop_sent: FinishReason | None = None
        self.stop_cause = ""  # why it was stopped from here, in a word
        self.prefix_hashes: tuple[int, ...] | None = None  # made once, when a record wants them
        self.logprobs: list[TokenLogprobs] = []  # of all tokens so far, if asked for
        self.prompt = PromptReport()  # comes with the first token, if asked for
        self._error: EngineDied | None = None
        self._tokens: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None  # wakes who waits in `take`; lighter than an event for each token

    def push(
        self,
        tokens: tuple[int, ...],
        now: float,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt: PromptReport | None = None,
    ) -> None:
        """New tokens came."""
        self.logprobs += logprobs
        self.prompt = prompt or self.prompt
        self.output_len += len(tokens)
        self.first_token = self.first_token or now
        self.last_token = now
        self._tokens.extend(tokens)
        self._wake()

    def end(self, ended: SequenceEnded) -> None:
        """The engine gave its last word."""
        self.ended = ended
        self._wake()

    def fail(self, error: EngineDied) -> None:
        """The engine won't give any more words."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[int]:
        """Wait for news and return the tokens that came since; look at `ended` after that. Raises `EngineDied`.

        One reader at a time.
        """
        if not self._tokens and self.ended is None and self._error is None:
            self._loop = self._loop or asyncio.get_running_loop()  # which costs a system call, and a reader has only one
            self._reader = self._loop.create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        tokens, self._tokens = self._tokens, []
        return tokens
