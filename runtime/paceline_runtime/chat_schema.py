"""The body of a chat: messages, tools, and which tool to call."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline_runtime.api_schema import ApiRequest
from paceline_runtime.body_schema import Body, refused

__all__ = ["ChatMessage", "ChatRequest", "Function", "Messages", "Tool", "ToolChoice", "Tools"]

_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
_MAX_MESSAGES = 8192  # 2048 in the OpenAI API; to check so many takes 50 ms


class TextPart(Body):
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier answer called. `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # what a client keeps of a stream


class ChatMessage(Body):
    """One turn of a chat. `tool_calls` go with an assistant's, `tool_call_id` with a tool's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # parts of OpenAI's answers that clients send back as they are
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' go with the role 'assistant' only")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("the role 'tool' needs 'tool_call_id'")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("'tool_call_id' goes with the role 'tool', and with no other")
        if self.content is None and not self.tool_calls:
            raise ValueError("'content' is missing")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class Function(Body):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments; none: it takes nothing."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool: functions only."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class ChatRequest(ApiRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise refused("tools", "two tools have the same name")
        self._check_choice(names)
        return self

    def _check_choice(self, names: list[str]) -> None:
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise refused("tool_choice", "'tool_choice' needs 'tools'")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise refused("tool_choice", f"'tool_choice' names {choice.function.name!r}, which isn't among the tools")
        formatted = self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )
        if self.forced_functions and formatted:
            raise refused("tool_choice", "a forced tool call leaves no room for 'response_format' or 'structured_outputs'")

    @property
    def functions(self) -> list[Function]:
        """The functions that may be called."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def forced_functions(self) -> list[Function]:
        """The functions one of which must be called, if one must be."""
        if self.tool_choice == "required":
            return self.functions
        if isinstance(self.tool_choice, ToolChoice):
            return [f for f in self.functions if f.name == self.tool_choice.function.name]
        return []

    @property
    def has_strict_functions(self) -> bool:
        """Whether the model is free to call functions, but not to call some of them as it likes."""
        return self.tool_choice in (None, "auto") and any(function.strict for function in self.functions)

    @property
    def one_call(self) -> bool:
        """Whether at most one tool call is wanted: a named function is called once."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ToolChoice)
