"""The OpenAPI document: bodies from the models that parse them, answers as they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline_runtime.api_schema import ACCEPTED

__all__ = [
    "CHAT",
    "COMPLETION",
    "DETOKENIZED",
    "EMBEDDINGS",
    "MODEL",
    "MODELS",
    "PLAIN",
    "PLAIN_OK",
    "TOKENIZED",
    "VERSION",
    "answered",
    "describe_app",
    "described",
]

Schema = dict[str, Any]
_REFERENCE = "#/components/schemas/{model}"
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY_TEXT: Schema = {"type": ["string", "null"]}
_REASONS = ["stop", "length", "tool_calls"]


def _object(**properties: Schema) -> Schema:
    """Describe an object all of whose properties are always there, unless its schema says `optional`."""
    required = [name for name, schema in properties.items() if not schema.get("x-optional")]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _optional(schema: Schema) -> Schema:
    return {**schema, "x-optional": True}


_CACHED = _object(cached_tokens=_COUNT)
_USAGE = _object(
    prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT, prompt_tokens_details=_optional(_CACHED)
)
_LOGPROBS: Schema = {"type": ["object", "null"]}
_REASON: Schema = {"type": ["string", "null"], "enum": [*_REASONS, None]}
_CALL = _object(id=_TEXT, type=_TEXT, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(role=_TEXT, content=_ANY_TEXT, refusal={"type": "null"}, tool_calls=_optional(_list(_CALL)))
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}

COMPLETION = _object(
    **_HEAD,
    choices=_list(_object(index=_COUNT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_REASON)),
    usage=_USAGE,
)
CHAT = _object(
    **_HEAD,
    choices=_list(_object(index=_COUNT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_REASON)),
    usage=_USAGE,
)
_VECTOR: Schema = {"oneOf": [_list({"type": "number"}), _TEXT]}
EMBEDDINGS = _object(
    object=_TEXT,
    model=_TEXT,
    data=_list(_object(object=_TEXT, index=_COUNT, embedding=_VECTOR)),
    usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
)
TOKENIZED = _object(
    count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs={"type": ["array", "null"], "items": _TEXT}
)
DETOKENIZED = _object(prompt=_TEXT)
VERSION = _object(version=_TEXT)
MODEL = _object(id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT, max_model_len={"type": ["integer", "null"]})
MODELS = _object(object=_TEXT, data=_list(MODEL))
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_ANY_TEXT, code=_TEXT))
# beside 200; what a proxy adds is its own affair
_ERRORS = {
    400: "The request can't be served as it is.",
    401: "No valid API key.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body isn't declared as JSON.",
    429: "Too many wait already: come back after `Retry-After`.",
    503: "Loading, restarting or shutting down: come back after `Retry-After`.",
    504: "The first token didn't come within `X-Request-Timeout`.",
}
_PLAIN_CONTENT = {"content": {"text/plain": {"schema": _TEXT}}}
PLAIN: Schema = {
    "responses": {200: {"description": "Yes.", **_PLAIN_CONTENT}, 503: {"description": "No, and why.", **_PLAIN_CONTENT}}
}
PLAIN_OK: Schema = {"responses": {200: {"description": "Text.", **_PLAIN_CONTENT}}}

_bodies: dict[str, type[BaseModel]] = {}


def described(body: type[BaseModel], answer: Schema, *, stream: bool = False) -> Schema:
    """Return what describes a route with a JSON body. The body is parsed by pydantic itself, whose errors say more."""
    _bodies[body.__name__] = body
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    request = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    route = answered(answer, *_ERRORS)
    if stream:
        route["responses"][200]["content"]["text/event-stream"] = {"schema": _TEXT}
    return {**route, "openapi_extra": request}


def answered(answer: Schema, *errors: int) -> Schema:
    """Return what describes a route's answers."""
    problems = {s: {"description": _ERRORS[s], "content": {"application/json": {"schema": _ERROR}}} for s in errors}
    good = {"description": "The answer.", "content": {"application/json": {"schema": answer}}}
    return {"responses": {200: good, **problems}, "response_model": None}


def describe_app(app: FastAPI) -> None:
    """Give the app its document, with the schemas of the bodies in it."""

    def document() -> Schema:
        if not app.openapi_schema:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema([(kind, "validation") for kind in _bodies.values()], ref_template=_REFERENCE)
            # the framework describes errors of its own, which never come
            made["components"] = {"schemas": schemas["$defs"]}
            for name in ("CompletionRequest", "ChatRequest"):
                schemas["$defs"][name]["properties"] |= ACCEPTED
            for path in made["paths"].values():
                for route in path.values():
                    route["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    made: Callable[[], Schema] = document
    app.openapi = made  # type: ignore[method-assign]  # the framework's own way to replace it
