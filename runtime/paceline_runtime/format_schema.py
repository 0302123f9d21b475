"""The parts of a body that say what form the text must have: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from paceline_runtime.body_schema import Body
from paceline_runtime.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

__all__ = ["GUIDED", "ResponseFormat", "StructuredOutputs", "guided"]

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class JsonSchemaFormat(Body):
    """The schema of a `response_format`. It is always followed to the letter, so `strict` changes nothing."""

    model_config = ConfigDict(populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type 'json_schema' needs 'json_schema'")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("'json_schema' belongs to the type 'json_schema', and to no other")
        return self

    def grammar(self) -> str | None:
        """Return the grammar, if there is any. Takes milliseconds. Raises `GrammarError`."""
        if self.type == "text":
            return None
        return json_grammar({"type": "object"} if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [
            value
            for value in (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
            if value is not None
        ]
        if len(given) != 1:
            raise ValueError("give exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'")
        return self

    def to_grammar(self) -> str:
        """Return the grammar. Takes milliseconds. Raises `GrammarError`."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.grammar is not None:
            return lark_grammar(self.grammar)
        return json_grammar({"type": "object"} if self.json_ is None else self.json_)


def guided(data: dict[str, Any]) -> dict[str, Any]:
    """Return a body with vLLM's older names (`guided_json`, …) in their new place."""
    old = {new: data[name] for name, new in GUIDED.items() if data.get(name) is not None}
    rest = {key: value for key, value in data.items() if key not in GUIDED}
    if not old:
        return rest
    newer = rest.get("structured_outputs") or {}
    return {**rest, "structured_outputs": {**newer, **old} if isinstance(newer, dict) else newer}
