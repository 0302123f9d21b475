"""Bodies of the OpenAI API as this server takes them. What OpenAI knows and we don't is refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline_runtime.body_schema import Body, refused
from paceline_runtime.format_schema import GUIDED, ResponseFormat, StructuredOutputs, guided
from paceline_runtime.sampling_params import MAX_BIASES
from paceline_runtime.tiers import MAX_PRIORITY, SERVICE_TIERS

__all__ = [
    "ACCEPTED",
    "ALTERNATIVES",
    "MAX_BATCH",
    "ApiRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "Prompts",
    "StreamOptions",
    "flat_prompts",
]

MAX_BATCH = 256  # sequences of one request: prompts × choices
_PROMPTS = f"a text, token ids, or a list of 1 to {MAX_BATCH} of either"

# fields that take values of several types, in words: pydantic would complain about the first type only
ALTERNATIVES = {
    "prompt": _PROMPTS,
    "input": _PROMPTS,
    "stop": "a text or a list of texts",
    "logit_bias": 'numbers by token id, as in {"50256": -100}',
    "content": 'a text or a list of {"type": "text", "text": …}',
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": …}}',
}

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Prompts = (
    str
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]
    | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]
)

# parameters of OpenAI and vLLM that would change the answer, with the value at which they change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
# parameters that change nothing about the answer
_IRRELEVANT = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "verbosity",
)  # fmt: skip


# what the bodies may hold beside their own fields, for the OpenAPI document
ACCEPTED: dict[str, Any] = {
    **{name: {"enum": list(neutral)} for name, neutral in _NEUTRAL.items()},
    **{name: {} for name in (*_IRRELEVANT, *GUIDED)},
}


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise refused("logit_bias", f"logit_bias may name at most {MAX_BIASES} tokens, got {len(biases)}")
    return biases


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ApiRequest(Body):
    """What both kinds of request have in common."""

    # ranges are checked by `SamplingParams`, which offline users meet too; here are the types
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float] | None, BeforeValidator(_few)] = None
    n: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, fail_fast=True)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_an_effect(cls, data: Any) -> Any:
        """Drop parameters that change nothing; refuse those that this server doesn't have."""
        if not isinstance(data, dict):
            return data
        for name, neutral in _NEUTRAL.items():
            if name in data and not any(_same(data[name], value) for value in neutral):
                raise refused(name, f"this server doesn't support {name!r} (other than {_words(neutral)})")
        return guided({key: value for key, value in data.items() if key not in _NEUTRAL and key not in _IRRELEVANT})

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "'stream_options' needs 'stream': true")
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.type != "text":
            raise refused("structured_outputs", "'structured_outputs' and 'response_format' exclude each other")
        return self

    @property
    def choices(self) -> int:
        """Answers wanted for each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def asked_priority(self) -> int | None:
        """The priority that the body asks for; a number says more than a tier. None: it asks for nothing."""
        return SERVICE_TIERS.get(self.service_tier or "") if self.priority is None else self.priority

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """What is added to the logits of which tokens."""
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())


class CompletionRequest(ApiRequest):
    """Body of `POST /v1/completions`. `prompt`: a text, token ids, or a batch of either."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.best_of not in (None, self.choices):
            raise refused("best_of", "this server doesn't support 'best_of' (other than null or the value of 'n')")
        if len(self.prompts) * self.choices > MAX_BATCH:
            raise refused("n", f"at most {MAX_BATCH} answers at once: lower 'n' or send fewer prompts")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The batch of prompts, of one where one was given."""
        return flat_prompts(self.prompt)


class EmbeddingRequest(Body):
    """Body of `POST /v1/embeddings`. `pooling`: from the hidden state of the last token, or the mean over all."""

    model: str | None = None
    input: Prompts
    encoding_format: Annotated[str, Field(pattern="^(float|base64)$")] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Annotated[str, Field(pattern="^(last|mean)$")] = "last"
    user: str | None = None


def flat_prompts(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return a batch of prompts, of one where one was given."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [[i for i in prompts if isinstance(i, int)]]
    return [p for p in prompts if not isinstance(p, int)]


def _same(given: Any, neutral: Any) -> bool:
    """Equal as JSON: 0 is 0.0, but not false."""
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)


def _words(neutral: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in neutral)
