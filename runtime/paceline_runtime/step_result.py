"""What a model's step brings beside tokens: log-probabilities and hidden states, for who asked. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline_core.plan import StepResult

__all__ = ["ModelStepResult", "PromptReport", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of a token and of the most likely ones by the model alone: before temperature, penalties,
    biases and masks. `top` holds (token id, log-probability), falling.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class PromptReport(NamedTuple):
    """What a sequence asked to know of its prompt, sent with its first token.

    `logprobs` are of its second token and those after it (nothing predicts the first); `embedding` is float32 as bytes.
    """

    logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class ModelStepResult(StepResult):
    """A `StepResult` with the log-probabilities of its tokens and the reports of prompts, for who asked for them."""

    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompts: Mapping[int, PromptReport] = field(default_factory=dict)
