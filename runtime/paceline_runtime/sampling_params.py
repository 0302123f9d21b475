"""How to sample one sequence (`SamplingParams`), in the terms of the OpenAI API and of vLLM. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline_runtime.model_errors import SamplingParamsError

__all__ = ["MAX_BIASES", "MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20  # the OpenAI API's bound
_MAX_STOPS = 16  # four in the OpenAI API; every stop text is searched in every new piece of text
_MAX_STOP_CHARS = 256
_MAX_STOP_IDS = 256
MAX_BIASES = 1024  # 300 in the OpenAI API
_MAX_REPETITION = 10.0  # what is more leaves no token that was seen before
_MAX_SEED = 2**64 - 1
_MAX_ID = 2**31 - 1  # of tokens and counts of them; what is larger fits no tensor and no message
# Below this the most likely token is all but certain, and logits divided by it leave float32: then no token is left to draw.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled and when it ends.

    - `max_tokens`: new tokens at most (≥ 1); `min_tokens`: no stop token before so many.
    - `temperature`: 0 (or less than 1e-5) is greedy, 1 the model's own distribution, at most 2.
    - `top_k`: only the k most likely tokens; 0 (or -1) is all of them. `top_p`: the smallest set with that share of the
      probability. `min_p`: tokens at least that likely relative to the most likely one.
    - `seed`: the same seed gives the same tokens, whatever else runs. None: a fresh one for each sequence.
    - `stop`: texts that end the sequence (a single text is taken as one), `stop_token_ids`: ids that do, beside the model's
      own; `ignore_eos` lets the model's own end-of-text pass.
    - `logprobs`: how many alternatives to report per token beside the chosen one; None reports nothing. `prompt_logprobs`:
      the same for the tokens of the prompt.
    - `presence_penalty`, `frequency_penalty`: what is taken off the logit of a token that was generated, once and each time;
      `repetition_penalty`: the factor (above 1 discourages) for every token of prompt and output. 0, 0, 1 change nothing.
    - `logit_bias`: what is added to which token's logit: a mapping, or (id, bias) pairs.
    - `grammar`: what the text must match, as `paceline_runtime.grammar` writes it.
    - `pooling`: the prompt's embedding is wanted, from its last token or as the mean over all.

    Raises `SamplingParamsError`, which names the field, for anything out of bounds.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    pooling: Literal["last", "mean"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("top_k", self.top_k, 0, _MAX_ID)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, "max_tokens")
        _number("temperature", self.temperature, 0, 2)
        _number("top_p", self.top_p, 0, 1, low_exclusive=True)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), _MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, _MAX_REPETITION, low_exclusive=True)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError("ignore_eos", f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.ignore_eos and self.grammar is not None:
            raise SamplingParamsError("ignore_eos", "ignore_eos doesn't go with a grammar: its text has an end")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < _GREEDY_BELOW

    @property
    def reads_cache(self) -> bool:
        """Whether prompt tokens may come from the prefix cache: what is asked of each of them isn't kept there."""
        return self.prompt_logprobs is None and self.pooling != "mean"

    @property
    def draftable(self) -> bool:
        """Whether tokens may be guessed ahead: a grammar says only of the next one whether it is allowed."""
        return self.grammar is None

    @property
    def penalised(self) -> bool:
        """Whether tokens that were seen before are less (or more) likely to come again."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def _texts(value: object) -> tuple[str, ...]:
    items: tuple[object, ...] = (value,) if isinstance(value, str) else _items("stop", () if value is None else value)
    texts = tuple(item for item in items if isinstance(item, str))
    if len(texts) < len(items):
        raise SamplingParamsError("stop", f"stop must be a text or a list of texts, got {value!r}")
    wrong = next((text for text in texts if not 0 < len(text) <= _MAX_STOP_CHARS), None)
    if len(texts) > _MAX_STOPS or wrong is not None:
        bound = f"at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARS} characters"
        got = f"{len(texts)}" if wrong is None else f"one of {len(wrong)} characters"
        raise SamplingParamsError("stop", f"stop must be {bound}, got {got}")
    return texts


def _ids(value: object) -> tuple[int, ...]:
    items = _items("stop_token_ids", value)
    ids = tuple(item for item in items if isinstance(item, int) and _is_int(item) and 0 <= item <= _MAX_ID)
    if len(ids) < len(items) or len(ids) > _MAX_STOP_IDS:
        bound = f"at most {_MAX_STOP_IDS} token ids"
        got = len(items) if len(items) > _MAX_STOP_IDS else next(item for item in items if item not in ids)
        raise SamplingParamsError("stop_token_ids", f"stop_token_ids must be a list of {bound}, got {got!r}")
    return ids


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    pairs = _items("logit_bias", value.items() if isinstance(value, Mapping) else value)
    if len(pairs) > MAX_BIASES:
        raise SamplingParamsError("logit_bias", f"logit_bias may name at most {MAX_BIASES} tokens, got {len(pairs)}")
    return tuple(_bias(pair) for pair in pairs)


def _bias(pair: object) -> tuple[int, float]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise SamplingParamsError("logit_bias", f"logit_bias must be pairs of a token id and a bias, got {pair!r}")
    token, bias = pair
    _integer("logit_bias", token, 0, _MAX_ID)
    _number("logit_bias", bias, -100, 100)
    return int(token), float(bias)


def _items(field: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, Iterable):
        raise SamplingParamsError(field, f"{field} must be a list, got {value!r}")
    return tuple(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(field: str, value: object, low: int, high: float = math.inf, high_name: str = "") -> None:
    if not _is_int(value) or not low <= value <= high:  # type: ignore[operator]  # the first test says it is an int
        bound = f"at least {low}" if high == math.inf else f"{low} to {high}{f' ({high_name})' if high_name else ''}"
        raise SamplingParamsError(field, f"{field} must be a whole number, {bound}, got {value!r}")


def _number(field: str, value: object, low: float, high: float, *, low_exclusive: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # nan fits nothing
    if not fits or (low_exclusive and value == low):
        bound = f"above {low:g} and at most {high:g}" if low_exclusive else f"{low:g} to {high:g}"
        raise SamplingParamsError(field, f"{field} must be a number, {bound}, got {value!r}")
