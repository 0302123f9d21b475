"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline_runtime.api_errors import invalid
from paceline_runtime.api_requests import chat_prompt
from paceline_runtime.body_schema import Body, refused
from paceline_runtime.chat_schema import ChatRequest, Messages, Tools
from paceline_runtime.service import Service, encode

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenized", "tokenized"]

_MAX_TOKENS = 1 << 20  # more fit into no model


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a `prompt` as in a completion, or `messages` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MAX_TOKENS, fail_fast=True)]


async def tokenized(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Return the tokens. Raises `ApiError` or `ChatTemplateError`."""
    tokenizer = service.tokens_for(body.model)
    if body.messages is None:
        tokens = await encode(tokenizer, body.prompt or "", add_special_tokens=body.add_special_tokens)
    else:
        chat = ChatRequest(messages=body.messages, tools=body.tools)
        tokens = await chat_prompt(tokenizer, chat, add_generation_prompt=body.add_generation_prompt)
    texts = [tokenizer.token_bytes(i).decode(errors="replace") for i in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": texts}


async def detokenized(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text. Raises `ApiError`."""
    tokenizer = service.tokens_for(body.model)
    if body.tokens and max(body.tokens) >= service.vocab_size:
        raise invalid(f"token ids must be below {service.vocab_size}, got {max(body.tokens)}", "tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)}
