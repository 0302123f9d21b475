"""The clock runner: takes plans as a model would, sleeps for the modelled step time and emits placeholder tokens.

Everything else of a server (API, admin, scheduler, metrics) is the real thing, so load, soak and tuning tests measure
batching rather than a small machine's arithmetic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline_core.plan import StepPlan
from paceline_core.step_time import StepPredictor
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.step_result import ModelStepResult, PromptReport, TokenLogprobs

__all__ = ["DEFAULT_CLOCK_BLOCKS", "DEFAULT_CLOCK_MODEL_LEN", "ClockModel", "ClockRunner"]

DEFAULT_CLOCK_BLOCKS = 16_384  # at kvMemoryFraction 1: 262,144 tokens in blocks of 16, an H200-like pool for an 8B model
DEFAULT_CLOCK_MODEL_LEN = 8192


class ClockRunner:
    """Runs plans on a modelled device: steps start when the one before has ended, as on a real one.

    `placeholder` is the text that every sequence generates, as token ids, from its start and over again.
    """

    def __init__(
        self,
        model: StepPredictor,
        placeholder: Sequence[int],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert placeholder, "a placeholder text has at least one token"
        self._model = model
        self._placeholder = tuple(placeholder)
        self._now, self._sleep = now, sleep
        self._prompt_len: dict[int, int] = {}
        self._wants_logprobs: set[int] = set()
        self._wants_prompt: set[int] = set()  # log-probabilities of the prompt, not given yet
        self._queue: deque[tuple[ModelStepResult, float]] = deque()  # with the modelled end
        self._free_at = 0.0

    def add(self, seq_id: int, prompt_tokens: Sequence[int], params: SamplingParams, matcher: object = None) -> None:
        """Remember where the prompt of a new sequence ends. Its text is the placeholder whatever is asked for."""
        self._prompt_len[seq_id] = len(prompt_tokens)
        if params.logprobs is not None:
            self._wants_logprobs.add(seq_id)
        if params.prompt_logprobs is not None:
            self._wants_prompt.add(seq_id)

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; its modelled time starts now, or when the one before it has ended."""
        for seq_id in plan.removed:
            self._prompt_len.pop(seq_id, None)
            self._wants_logprobs.discard(seq_id)
            self._wants_prompt.discard(seq_id)
        seconds = self._duration(plan)
        self._free_at = max(self._now(), self._free_at) + seconds
        # told now: when its turn comes, the next plan may have removed a sequence that this one names
        self._queue.append((self._told(plan, seconds), self._free_at))

    def collect(self) -> ModelStepResult:
        """Sleep until the oldest plan's modelled end and return its tokens."""
        result, end = self._queue.popleft()
        if (left := end - self._now()) > 0:
            self._sleep(left)
        return result

    def _told(self, plan: StepPlan, seconds: float) -> ModelStepResult:
        """Return what comes of a plan, which doesn't depend on when."""
        tokens = {s.seq_id: (self._token(s.seq_id, s.start + s.num_tokens),) for s in plan.scheduled if s.samples}
        # a clock is sure of what it says: the log-probability of every token is 0
        certain = (TokenLogprobs(0.0),)
        logprobs = dict.fromkeys(self._wants_logprobs.intersection(tokens), certain)
        wanted = self._wants_prompt.intersection(tokens)
        self._wants_prompt -= wanted
        prompts = {i: PromptReport(certain * (self._prompt_len[i] - 1)) for i in wanted}
        return ModelStepResult(tokens, seconds, logprobs, prompts)

    def close(self) -> None:
        """Nothing to release."""

    def _duration(self, plan: StepPlan) -> float:
        return max(0.0, self._model.predict(plan.shape)) if plan.scheduled else 0.0

    def _token(self, seq_id: int, num_known: int) -> int:
        return self._placeholder[(num_known - self._prompt_len[seq_id]) % len(self._placeholder)]


@dataclass(frozen=True, slots=True)
class ClockModel:
    """What the engine needs to know of a modelled device; the counterpart of a loaded model."""

    runner: ClockRunner
    pool_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_memory_fraction: float
    device: str = "clock"

    @property
    def num_blocks(self) -> int:
        """KV blocks at the fraction that the server starts with."""
        return self.blocks_for(self.kv_memory_fraction)

    def blocks_for(self, kv_memory_fraction: float) -> int:
        """KV blocks in this share of the modelled memory."""
        return max(1, int(self.pool_blocks * kv_memory_fraction))

    def check_step(self, tokens: int, num_blocks: int) -> None:
        """A clock's steps need no memory."""
