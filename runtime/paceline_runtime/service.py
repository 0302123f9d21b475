"""What the public API does, without HTTP: admission, prompts to tokens, submission to the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from paceline_runtime.api_errors import ApiError, invalid, unavailable
from paceline_runtime.api_schema import ApiRequest, ChatRequest, CompletionRequest
from paceline_runtime.drain import Drain, DrainPhase
from paceline_runtime.engine_client import EngineClient, EngineState
from paceline_runtime.generation import Generation
from paceline_runtime.knob_store import KnobStore
from paceline_runtime.metrics import RuntimeMetrics
from paceline_runtime.observe import ObserveLog
from paceline_runtime.recorder import Recorder
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.sequence import Submission
from paceline_runtime.settings import RuntimeSettings
from paceline_runtime.text_stream import TextStream, Tokenizer

__all__ = ["CallOptions", "Service"]

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions
_LONG_TEXT = 20_000  # characters: about 5 ms of tokenising, from which on a thread is worth it


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a client says beside the body. `timeout` is seconds until the first token stops being useful."""

    request_id: str
    priority: int = 0
    timeout: float | None = None
    arrival: float = field(default_factory=time.monotonic)


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
    tokenizer: Tokenizer | None = None
    started: int = field(default_factory=lambda: int(time.time()))

    def not_ready_reason(self) -> str | None:
        """Return why no new work should come here, or None."""
        if self.drain.phase is not DrainPhase.SERVING:
            return "draining"
        if self.client.state is not EngineState.READY:
            return f"engine {self.client.state}"
        return None if self.tokenizer is not None else "tokenizer loading"

    def admit(self, model: str | None) -> Tokenizer:
        """Return the tokenizer if a new request may come in. Raises `ApiError` (404, 429, 503), counted as rejected."""
        try:
            return self._admit(model)
        except ApiError:
            self.metrics.count_request("rejected")
            raise

    def _admit(self, model: str | None) -> Tokenizer:
        if model is not None and model != self.settings.served_model_name:
            message = f"the model {model!r} doesn't exist here: this server has {self.settings.served_model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        if self.drain.phase is DrainPhase.CLOSED:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.tokenizer is None or self.client.state is not EngineState.READY:
            raise unavailable(f"not ready: {self.not_ready_reason()}", "not_ready", "2")
        self._check_queue()
        return self.tokenizer

    def _check_queue(self) -> None:
        waiting = len(self.client.live) - self.knobs.target.max_num_seqs
        if waiting >= self.settings.max_queue_len:
            retry = {"Retry-After": self.recorder.retry_after(waiting)}
            raise ApiError(429, f"{waiting} requests wait already: come back later", code="queue_full", headers=retry)

    async def complete(self, body: CompletionRequest, options: CallOptions) -> list[Generation]:
        """Start the generations of a completion request, `n` for each prompt."""
        tokenizer = self.admit(body.model)
        prompts = [p if isinstance(p, list) else await _encode(tokenizer, p, add_special_tokens=True) for p in body.prompts]
        asked = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return self._start_all(tokenizer, prompts, body, asked, options)

    async def chat(self, body: ChatRequest, options: CallOptions) -> list[Generation]:
        """Start the `n` generations of a chat request."""
        tokenizer = self.admit(body.model)
        text = await asyncio.to_thread(tokenizer.apply_chat_template, body.template_messages)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        # the template has put the model's special tokens where they belong
        prompt = await _encode(tokenizer, text, add_special_tokens=False)
        return self._start_all(tokenizer, [prompt], body, asked, options)

    def _start_all(
        self, tokenizer: Tokenizer, prompts: list[list[int]], body: ApiRequest, asked: int | None, options: CallOptions
    ) -> list[Generation]:
        """Check every prompt, then submit them all: a batch is refused whole."""
        checked = [(prompt, sampling(body, self._room(prompt, asked))) for prompt in prompts]
        try:
            self._check_queue()  # again: others were submitted while the prompts became tokens
        except ApiError:
            self.metrics.count_request("rejected")
            raise
        return [
            self._start(tokenizer, prompt, _of_choice(params, choice), options)
            for prompt, params in checked
            for choice in range(body.choices)
        ]

    def _start(self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, options: CallOptions) -> Generation:
        deadline = None if options.timeout is None else options.arrival + options.timeout
        submission = Submission(options.request_id, prompt, params, options.arrival, options.priority, deadline)
        ready = self.client.ready
        assert ready is not None, "admitted only when the engine is ready"
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else ready.eos_token_ids))
        text = TextStream(tokenizer.detokenizer(), params, stop_ids)
        return Generation(self.client, self.client.submit(submission), text)

    def _room(self, prompt: list[int], asked: int | None) -> int:
        """Return how many tokens may be generated. Raises `ApiError` if the prompt (or what is asked) doesn't fit."""
        ready = self.client.ready
        if ready is None:
            raise unavailable("not ready: engine restarting", "not_ready")
        if not prompt:
            raise invalid("the prompt has no tokens", "prompt")
        if max(prompt) >= ready.vocab_size:
            raise invalid(f"token ids must be below {ready.vocab_size}, got {max(prompt)}", "prompt")
        context = min(ready.max_model_len, ready.num_blocks * self.knobs.target.block_size)
        if len(prompt) + (asked or 1) > context:
            parts = f"{len(prompt)} in the prompt" + (
                f" and {asked} to generate" if asked else ", with none left to generate"
            )
            message = f"this server's context is {context} tokens, and you asked for {parts}"
            raise invalid(message, "prompt", "context_length_exceeded")
        return context - len(prompt) if asked is None else asked


def sampling(body: ApiRequest, max_tokens: int) -> SamplingParams:
    """Return how to sample; what the client left out (or null) takes OpenAI's default. Raises `SamplingParamsError`."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else body.top_k,
        min_p=0.0 if body.min_p is None else body.min_p,
        seed=body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return how choice 0, 1, … of a prompt is sampled: a seed gives all of them, but not the same to each."""
    if params.seed is None or not choice:
        return params
    return replace(params, seed=(params.seed + choice) % 2**64)


async def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
