"""Bodies of the OpenAI API as this server takes them. What OpenAI knows and we don't is refused by name, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["ALTERNATIVES", "ApiRequest", "ChatMessage", "ChatRequest", "CompletionRequest", "StreamOptions"]

MAX_BATCH = 256  # sequences of one request: prompts × choices

# fields that take values of several types, in words: pydantic would complain about the first type only
ALTERNATIVES = {
    "prompt": f"a text, token ids, or a list of 1 to {MAX_BATCH} of either",
    "stop": "a text or a list of texts",
    "content": 'a text or a list of {"type": "text", "text": …}',
}

TokenIds = list[Annotated[int, Field(ge=0)]]

# parameters of OpenAI and vLLM that would change the answer, with the value at which they change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
# parameters that change nothing about the answer
_IRRELEVANT = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "reasoning_effort", "verbosity",
)  # fmt: skip


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class ApiRequest(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # ranges are checked by `SamplingParams`, which offline users meet too; here are the types
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_an_effect(cls, data: Any) -> Any:
        """Drop parameters that change nothing; refuse those that this server doesn't have."""
        if not isinstance(data, dict):
            return data
        for name, neutral in _NEUTRAL.items():
            if name in data and not any(_same(data[name], value) for value in neutral):
                raise _refused(name, f"this server doesn't support {name!r} (other than {_words(neutral)}) yet")
        return {key: value for key, value in data.items() if key not in _NEUTRAL and key not in _IRRELEVANT}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "'stream_options' needs 'stream': true")
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
    def include_usage(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(ApiRequest):
    """Body of `POST /v1/completions`. `prompt`: a text, token ids, or a batch of either."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_BATCH)]
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MAX_BATCH)]
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if len(self.prompts) * self.choices > MAX_BATCH:
            raise _refused("n", f"at most {MAX_BATCH} answers at once: lower 'n' or send fewer prompts")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The batch of prompts, of one where one was given."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TextPart(BaseModel):
    """A part of a message: text only."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class ChatRequest(ApiRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None

    @property
    def template_messages(self) -> list[dict[str, str]]:
        """The messages as chat templates take them; `developer` is the newer name of `system`."""
        return [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in self.messages]


def _refused(param: str, message: str) -> PydanticCustomError:
    """Return the error of a whole body that is due to one parameter; pydantic gives such errors no place."""
    return PydanticCustomError("refused_parameter", "{words}", {"words": message, "param": param})


def _same(given: Any, neutral: Any) -> bool:
    """Equal as JSON: 0 is 0.0, but not false."""
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)


def _words(neutral: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in neutral)
