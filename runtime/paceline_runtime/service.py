"""What the public API does, without HTTP: admission, prompts to tokens, submission to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline_runtime.admission import Admission
from paceline_runtime.api_errors import ApiError, invalid, unavailable
from paceline_runtime.call_options import CallOptions
from paceline_runtime.drain import Drain, DrainPhase
from paceline_runtime.engine_client import EngineClient, EngineState
from paceline_runtime.generation import Echo, Generation
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog
from paceline_runtime.recorder import Recorder
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.sequence import Submission
from paceline_runtime.settings import RuntimeSettings
from paceline_runtime.text_stream import TextStream, Tokenizer

__all__ = ["CallOptions", "Job", "Service", "encode"]

_LONG_TEXT = 20_000  # characters: about 5 ms of tokenising, from which on a thread is worth it


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence of a request."""

    prompt: list[int]
    params: SamplingParams
    echo: Echo | None = None


@dataclass(slots=True)
class Service:
    """The parts of one server, shared by both ports. `tokenizer` comes when it is loaded."""

    settings: RuntimeSettings
    knobs: KnobStore
    metrics: RuntimeMetrics
    log: ObserveLog
    recorder: Recorder
    client: EngineClient
    drain: Drain
    admission: Admission
    tokenizer: Tokenizer | None = None
    started: int = field(default_factory=lambda: int(time.time()))

    def not_ready_reason(self) -> str | None:
        """Return why no new work should come here, or None."""
        if self.drain.phase is not DrainPhase.SERVING:
            return "draining"
        if self.client.state is not EngineState.READY:
            return f"engine {self.client.state}"
        return None if self.tokenizer is not None else "tokenizer loading"

    def admit(self, model: str | None, options: CallOptions | None = None) -> Tokenizer:
        """Return the tokenizer if a new request may come in. Raises `ApiError` (404, 429, 503), counted as rejected."""
        try:
            self._check_model(model)
            if self.tokenizer is None:
                raise unavailable(f"not ready: {self.not_ready_reason()}", "not_ready", "2")
            self.admission.check(options or CallOptions(""))
            return self.tokenizer
        except ApiError as error:
            self.admission.turned_away(error, options)
            raise

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.settings.served_model_name:
            message = f"the model {model!r} doesn't exist here: this server has {self.settings.served_model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def tokens_for(self, model: str | None) -> Tokenizer:
        """Return the tokenizer for what needs no step. Raises `ApiError` (404, 503)."""
        self._check_model(model)
        if self.tokenizer is None or self.client.ready is None:
            raise unavailable(f"not ready: {self.not_ready_reason()}", "not_ready", "2")
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence. Only once an engine was ready."""
        assert self.client.ready is not None, "asked of a server that has a model"
        return self.client.ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Only once an engine was ready."""
        assert self.client.ready is not None, "asked of a server that has a model"
        return self.client.ready.vocab_size

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Raise `ApiError` unless the model has all of these tokens. Only once an engine was ready."""
        if (highest := max(ids, default=0)) >= self.vocab_size:
            raise invalid(f"token ids must be below {self.vocab_size}, got {highest}", param)

    async def prompt_ids(self, tokenizer: Tokenizer, given: str | list[int], param: str) -> list[int]:
        """Return the tokens of a prompt that is a text or its tokens. Raises `ApiError` for a text that can't fit."""
        if isinstance(given, list):
            return given
        self.check_chars(tokenizer, len(given), param)
        return await encode(tokenizer, given, add_special_tokens=True)

    def check_chars(self, tokenizer: Tokenizer, chars: int, param: str) -> None:
        """Raise `ApiError` if a text can't fit, whatever its tokens are: to find them would take seconds per megabyte."""
        context = self._context()
        if chars > context * tokenizer.max_token_chars:
            message = f"this server's context is {context} tokens, and {chars} characters are more than that"
            raise invalid(message, param, "context_length_exceeded")

    def _context(self) -> int:
        ready = self.client.ready
        if ready is None:
            raise unavailable("not ready: engine restarting", "not_ready")
        return min(ready.max_model_len, ready.num_blocks * self.knobs.target.block_size)

    def start(self, tokenizer: Tokenizer, jobs: Sequence[Job], options: CallOptions) -> list[Generation]:
        """Submit all of a request's jobs, or (queue full: `ApiError`) none."""
        try:
            wait = self.admission.check(options)  # again: others were submitted while the prompts became tokens
        except ApiError as error:
            self.admission.turned_away(error, options, max(len(job.prompt) for job in jobs))
            raise
        self.metrics.histogram("params_n").observe(len(jobs))
        return [self._start(tokenizer, job, options, wait) for job in jobs]

    def _start(self, tokenizer: Tokenizer, job: Job, options: CallOptions, wait: float) -> Generation:
        params = job.params
        submission = Submission(
            options.request_id,
            job.prompt,
            params,
            options.arrival,
            options.priority,
            deadline=None if options.timeout is None else options.arrival + options.timeout,
            tenant=options.tenant,
            salt=options.salt,
            predicted_wait=wait,
            traceparent=options.traceparent,
        )
        ready = self.client.ready
        assert ready is not None, "admitted only when the engine is ready"
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else ready.eos_token_ids))
        text = TextStream(tokenizer.detokenizer(), params, stop_ids)
        return Generation(self.client, self.client.submit(submission), text, job.echo)

    def room(self, prompt: list[int], asked: int | None, param: str = "prompt") -> int:
        """Return how many tokens may be generated. Raises `ApiError` if the prompt (or what is asked) doesn't fit."""
        context = self._context()
        if not prompt:
            raise invalid("the prompt has no tokens", param)
        self.check_ids(prompt, param)
        if len(prompt) + (asked or 1) > context:
            parts = f"{len(prompt)} in the prompt" + (
                f" and {asked} to generate" if asked else ", with none left to generate"
            )
            message = f"this server's context is {context} tokens, and you asked for {parts}"
            raise invalid(message, param, "context_length_exceeded")
        return context - len(prompt) if asked is None else asked


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text; a long one becomes them on a thread."""
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
