"""From the body of a request to generations that run and the shape of their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from paceline_runtime.api_errors import invalid
from paceline_runtime.api_schema import ApiRequest, CompletionRequest
from paceline_runtime.chat_schema import ChatRequest
from paceline_runtime.generation import Echo, Generation
from paceline_runtime.model_errors import GrammarError
from paceline_runtime.openai_replies import ChatReply, CompletionReply
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.service import CallOptions, Job, Service, encode
from paceline_runtime.text_stream import Tokenizer
from paceline_runtime.tool_formats import ToolFormat, tool_format_of
from paceline_runtime.tool_parser import ToolParser
from paceline_runtime.tool_prompt import template_messages, template_tools

__all__ = ["chat_prompt", "start_chat", "start_completion"]

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


async def start_completion(
    service: Service, body: CompletionRequest, options: CallOptions
) -> tuple[list[Generation], CompletionReply]:
    """Start the generations of a completion request, `n` for each prompt. Raises `ApiError`."""
    options = options.preferring(body.asked_priority)
    tokenizer = service.admit(body.model, options)
    grammar = await _text_grammar(body)
    prompts = [await service.prompt_ids(tokenizer, given, "prompt") for given in body.prompts]
    service.check_ids((token for token, _ in body.biases), "logit_bias")
    asked = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    only_echo = bool(body.echo) and asked == 0
    logprobs, prompt_logprobs = body.logprobs, body.logprobs if body.echo else None
    jobs = []
    for given, prompt in zip(body.prompts, prompts, strict=True):
        # an answer that is only the prompt needs a step all the same: what the model thinks of the prompt comes of it
        params = sampling(body, service.room(prompt, 1 if only_echo else asked), logprobs, grammar)
        params = replace(params, prompt_logprobs=prompt_logprobs)
        echo = _echo(tokenizer, given, prompt, logprobs, only=only_echo) if body.echo else None
        jobs += [Job(prompt, _of_choice(params, choice), echo) for choice in range(body.choices)]
    reply = CompletionReply(
        f"cmpl-{options.request_id}", service.settings.served_model_name, tokenizer, body.choices, body.include_usage,
        logprobs is not None,
    )  # fmt: skip
    return service.start(tokenizer, jobs, options), reply


async def start_chat(service: Service, body: ChatRequest, options: CallOptions) -> tuple[list[Generation], ChatReply]:
    """Start the `n` generations of a chat request. Raises `ApiError`."""
    options = options.preferring(body.asked_priority)
    tokenizer = service.admit(body.model, options)
    tools = tool_format_of(tokenizer.chat_template)
    grammar = await _chat_grammar(body, tools)
    service.check_chars(tokenizer, sum(len(message.text) for message in body.messages), "messages")
    prompt = await chat_prompt(tokenizer, body)
    service.check_ids((token for token, _ in body.biases), "logit_bias")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling(body, service.room(prompt, asked), logprobs, grammar)
    jobs = [Job(prompt, _of_choice(params, choice)) for choice in range(body.choices)]
    parsers = [ToolParser(tools.marks) for _ in jobs] if body.functions else []
    reply = ChatReply(
        f"chatcmpl-{options.request_id}", service.settings.served_model_name, tokenizer, body.choices, body.include_usage,
        logprobs is not None, parsers=parsers,
    )  # fmt: skip
    return service.start(tokenizer, jobs, options), reply


async def chat_prompt(tokenizer: Tokenizer, body: ChatRequest, *, add_generation_prompt: bool = True) -> list[int]:
    """Return the tokens of a chat. Raises `ChatTemplateError`."""
    native = "tools" in tokenizer.chat_template
    messages = template_messages(body.messages, body.functions, template_knows_tools=native)
    tools = template_tools(body.functions) if native else None
    text = await asyncio.to_thread(
        tokenizer.apply_chat_template, messages, add_generation_prompt=add_generation_prompt, tools=tools
    )
    # the template has put the model's special tokens where they belong
    return await encode(tokenizer, text, add_special_tokens=False)


def sampling(body: ApiRequest, max_tokens: int, logprobs: int | None, grammar: str | None) -> SamplingParams:
    """Return how to sample; what the client left out (or null) takes OpenAI's default. Raises `SamplingParamsError`."""
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else body.top_k,
        min_p=0.0 if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.biases,
        seed=body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        grammar=grammar,
    )


async def _chat_grammar(body: ChatRequest, tools: ToolFormat) -> str | None:
    if body.forced_functions:
        return await _compiled("tools", lambda: tools.grammar(body.forced_functions, one_call=body.one_call))
    grammar = await _text_grammar(body)
    if grammar is not None or not body.has_strict_functions:
        return grammar
    return await _compiled("tools", lambda: tools.strict_grammar(body.functions, one_call=body.one_call))


async def _text_grammar(body: ApiRequest) -> str | None:
    if body.structured_outputs is not None:
        return await _compiled("structured_outputs", body.structured_outputs.to_grammar)
    if body.response_format is not None:
        return await _compiled("response_format", body.response_format.grammar)
    return None


async def _compiled(param: str, make: Callable[[], str | None]) -> str | None:
    """Check a grammar on a thread. Raises `ApiError`."""
    try:
        return await asyncio.to_thread(make)
    except GrammarError as error:
        raise invalid(f"Invalid value for {param!r}: {error}", param, "invalid_grammar") from None


def _echo(tokenizer: Tokenizer, given: str | list[int], prompt: list[int], logprobs: int | None, *, only: bool) -> Echo:
    text = given if isinstance(given, str) else tokenizer.decode(prompt)
    if logprobs is None:
        return Echo(text, only=only)
    decoder, offsets, length = tokenizer.detokenizer(), [], 0
    for token in prompt:
        offsets.append(length)
        length += len(decoder.push((token,)))
    return Echo(text, tuple(offsets), only)


def _of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return how choice 0, 1, … of a prompt is sampled: a seed gives all of them, but not the same to each."""
    if params.seed is None or not choice:
        return params
    return replace(params, seed=(params.seed + choice) % 2**64)
