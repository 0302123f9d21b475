"""The public API on the clock device: what clients of OpenAI see, right and wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from serving_process import PATIENCE, SLOW, RuntimeProcess, events, eventually

from paceline_runtime.api_schema import CompletionRequest, EmbeddingRequest
from paceline_runtime.api_tokens import DetokenizeRequest, TokenizeRequest
from paceline_runtime.backend import CLOCK_TEXT
from paceline_runtime.chat_schema import ChatRequest

TEXT = CLOCK_TEXT * 20


def text_of(num_bytes: int) -> str:
    """What the clock says with so many byte tokens; bytes of an unfinished character at the end show as one mark."""
    return TEXT.encode()[:num_bytes].decode(errors="replace")


@pytest.fixture(scope="module")
def client(shared_runtime: RuntimeProcess):
    with openai.OpenAI(base_url=shared_runtime.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_completion_through_the_official_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="clock", prompt="hello", max_tokens=40, temperature=0.5, top_p=0.9, seed=1)
    assert answer.choices[0].text == text_of(40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 40, 45)


def test_chat_through_the_official_client(client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(model="clock", messages=messages, max_completion_tokens=9)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(9)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("system: be brief\nuser: hi\nassistant: ")


def test_chat_stream_has_role_text_reason_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="clock", messages=[{"role": "user", "content": "hi"}], max_tokens=60, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(60)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60


@pytest.mark.parametrize("num_tokens", range(24, 60))
def test_a_stream_never_splits_a_character(client: openai.OpenAI, num_tokens: int) -> None:
    stream = client.completions.create(model="clock", prompt="x", max_tokens=num_tokens, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == text_of(num_tokens)
    whole = TEXT.encode()[:num_tokens].decode(errors="ignore")
    assert "\ufffd" not in "".join(pieces)[: len(whole)]


@pytest.mark.parametrize("stop", ["naïve", [" été", "naï"], "the beat", ["zzz", "速い"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_ends_and_is_never_shown(client: openai.OpenAI, stop: str | list[str], stream: bool) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = TEXT[: min(i for s in stops if (i := TEXT.find(s)) >= 0)]
    answer = client.completions.create(model="clock", prompt="x", max_tokens=200, stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].text for c in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"


def test_stop_before_min_tokens_is_text_like_any_other(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="clock", prompt="x", max_tokens=400, stop=["Paceline"], extra_body={"min_tokens": 20}
    )
    assert answer.choices[0].text == CLOCK_TEXT
    assert answer.choices[0].finish_reason == "stop"


def test_stop_token_id_ends_and_is_counted_but_not_shown(shared_runtime: RuntimeProcess) -> None:
    answer = shared_runtime.complete(max_tokens=100, stop_token_ids=[ord("k")]).json()
    assert answer["choices"][0]["text"] == TEXT[: TEXT.index("k")]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(TEXT[: TEXT.index("k") + 1])


def test_prompts_as_token_ids_and_in_batches(client: openai.OpenAI) -> None:
    ids = client.completions.create(model="clock", prompt=[1, 2, 3], max_tokens=3)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    batch = client.completions.create(model="clock", prompt=["a", "bc"], max_tokens=3)
    assert [c.index for c in batch.choices] == [0, 1]
    assert batch.usage is not None
    assert (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (3, 6)


def test_batches_and_choices_stream_side_by_side(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="clock", prompt=["a", "bc"], n=2, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    for index in range(4):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in own) == text_of(30)
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
    order = [c.choices[0].index for c in chunks]
    assert order != sorted(order)  # not one after the other
    assert all(c.usage is None for c in chunks)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 120)


def test_choices_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="clock", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=5
    )  # fmt: skip
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, text_of(5)) for i in range(3)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("user: hi\nassistant: "), 15)


def test_a_batch_that_leaves_frees_all_its_slots(shared_runtime: RuntimeProcess) -> None:
    with shared_runtime.stream(prompt=["a", "b"], n=2, max_tokens=8000) as response:
        pieces = events(response)  # kept: an iterator that is dropped closes the stream
        next(pieces)
        eventually(lambda: shared_runtime.gauges()["running"] == 4, "all of it runs")
    eventually(lambda: shared_runtime.gauges()["running"] == 0, "it is aborted")


def test_models_and_version(client: openai.OpenAI, shared_runtime: RuntimeProcess) -> None:
    assert [m.id for m in client.models.list()] == ["clock"]
    assert client.models.retrieve("clock").id == "clock"
    assert shared_runtime.http.get("/version").json()["version"]


def test_request_id_comes_back(shared_runtime: RuntimeProcess) -> None:
    given = shared_runtime.http.get("/health/live", headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    made = shared_runtime.http.get("/health/live", headers={"X-Request-Id": "not fit for a log"})
    assert made.headers["x-request-id"] != "not fit for a log"


BAD_BODIES = [
    ("unknown model", {"model": "gpt-4"}, 404, "model"),
    ("negative max_tokens", {"max_tokens": -1}, 400, "max_tokens"),
    ("zero max_tokens", {"max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens as text", {"max_tokens": "5"}, 400, "max_tokens"),
    ("max_tokens as a fraction", {"max_tokens": 1.5}, 400, "max_tokens"),
    ("temperature out of range", {"temperature": 3}, 400, "temperature"),
    ("temperature of a wrong type", {"temperature": "hot"}, 400, "temperature"),
    ("top_p zero", {"top_p": 0}, 400, "top_p"),
    ("top_k below -1", {"top_k": -2}, 400, "top_k"),
    ("top_k beyond any message", {"top_k": 1 << 64}, 400, "top_k"),
    ("a stop token beyond any message", {"stop_token_ids": [1 << 64]}, 400, "stop_token_ids"),
    ("seed beyond 64 bits", {"seed": 1 << 70}, 400, "seed"),
    ("min above max", {"max_tokens": 4, "min_tokens": 5}, 400, "min_tokens"),
    ("empty stop text", {"stop": ""}, 400, "stop"),
    ("too many stop texts", {"stop": ["a"] * 40}, 400, "stop"),
    ("unknown argument", {"temprature": 1}, 400, "temprature"),
    ("no choices", {"n": 0}, 400, "n"),
    ("more choices than one request may have", {"n": 129, "prompt": ["a", "b"]}, 400, "n"),
    ("more logprobs than there are", {"logprobs": 21}, 400, "logprobs"),
    ("logprobs as a switch", {"logprobs": True}, 400, "logprobs"),
    ("a penalty out of range", {"frequency_penalty": 2.5}, 400, "frequency_penalty"),
    ("another penalty out of range", {"presence_penalty": -3}, 400, "presence_penalty"),
    ("a repetition penalty of nothing", {"repetition_penalty": 0}, 400, "repetition_penalty"),
    ("min_p above one", {"min_p": 1.5}, 400, "min_p"),
    ("a bias out of range", {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ("a bias of a word", {"logit_bias": {"yes": 1}}, 400, "logit_bias"),
    ("a bias of a number in another script", {"logit_bias": {"\uff15": 1}}, 400, "logit_bias"),
    ("a bias of no number", {"logit_bias": {"5": "x"}}, 400, "logit_bias"),
    ("a bias of a token that there isn't", {"logit_bias": {"5": 1, "100000": 1}}, 400, "logit_bias"),
    ("best_of beyond n", {"best_of": 2}, 400, "best_of"),
    ("a suffix", {"suffix": "end"}, 400, "suffix"),
    ("ignored end and a grammar", {"ignore_eos": True, "guided_regex": "a"}, 400, "ignore_eos"),
    ("two grammars", {"guided_regex": "a", "guided_choice": ["b"]}, 400, "structured_outputs"),
    ("a broken regular expression", {"guided_regex": "("}, 400, "structured_outputs"),
    ("a schema of no type", {"guided_json": {"type": "wizard"}}, 400, "structured_outputs"),
    ("a schema with no value", {"guided_json": {"type": "integer", "minimum": 5, "maximum": 1}}, 400, "structured_outputs"),
    ("a schema that points nowhere", {"guided_json": {"$ref": "#/$defs/x"}}, 400, "structured_outputs"),
    ("a schema that points elsewhere", {"guided_json": {"$ref": "http://example.com/"}}, 400, "structured_outputs"),
    ("an unsupported keyword", {"guided_json": {"not": {"type": "string"}}}, 400, "structured_outputs"),
    (
        "a schema of a megabyte",
        {"guided_json": {"enum": ["a long word"] * 90_000}},
        400,
        "structured_outputs",
    ),
    ("a schema without one", {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("an unknown format", {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ("stream options without a stream", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("a prompt of a wrong type", {"prompt": 5}, 400, "prompt"),
    ("a stop text of a wrong type", {"stop": [1]}, 400, "stop"),
    ("no prompt tokens", {"prompt": ""}, 400, "prompt"),
    ("an empty list of prompts", {"prompt": []}, 400, "prompt"),
    ("token ids beyond the vocabulary", {"prompt": [1, 100000]}, 400, "prompt"),
    ("negative token ids", {"prompt": [-1]}, 400, "prompt"),
    ("a prompt beyond the context", {"prompt": "x" * 9000}, 400, "prompt"),
    ("a prompt and max_tokens beyond the context", {"max_tokens": 8192}, 400, "prompt"),
]


@pytest.mark.parametrize(("what", "change", "status", "param"), BAD_BODIES, ids=[b[0] for b in BAD_BODIES])
def test_bad_parameters(shared_runtime: RuntimeProcess, what: str, change: dict, status: int, param: str) -> None:
    answer = shared_runtime.complete(**change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] and error["code"]
    assert error["param"] == param
    assert "Value error" not in error["message"]


USER = {"role": "user", "content": "x"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def tool(name: str, parameters: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("messages", [[], None, "hi", [{"role": "wizard", "content": "x"}], [{"content": "x"}], [5]])
def test_bad_messages(shared_runtime: RuntimeProcess, messages: object) -> None:
    answer = shared_runtime.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("completions", {"prompt": [-1]}, "prompt", "expected a text, token ids, or a list of 1 to 256 of either"),
        ("completions", {"prompt": "x", "stop": [1]}, "stop", "expected a text or a list of texts"),
        ("completions", [], None, "the body must be a JSON object"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            'expected a text or a list of {"type": "text", "text": …}',
        ),
        ("chat/completions", {"messages": [USER], "tools": [{}]}, "tools.0.type", "Missing required parameter"),
        ("chat/completions", {"messages": [USER], "tools": [tool("a b")]}, "tools.0.function.name", "should match pattern"),
        ("chat/completions", {"messages": [USER], "tools": [tool("a"), tool("a")]}, "tools", "the same name"),
        ("chat/completions", {"messages": [USER], "tools": [tool("a")], "tool_choice": "any"}, "tool_choice", '"required"'),
        ("chat/completions", {"messages": [USER], "tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        (
            "chat/completions",
            {"messages": [USER], "tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
            "isn't among the tools",
        ),
        (
            "chat/completions",
            {"messages": [USER], "tools": [tool("a", {"type": "wizard"})], "tool_choice": "required"},
            "tools",
            "wizard",
        ),
        ("chat/completions", {"messages": [{**USER, "role": "tool"}]}, "messages.0", "needs 'tool_call_id'"),
        ("chat/completions", {"messages": [{**USER, "tool_call_id": "x"}]}, "messages.0", "'tool_call_id' goes with"),
        ("chat/completions", {"messages": [USER], "logit_bias": {"900": 1}}, "logit_bias", "token ids must be below 257"),
        ("chat/completions", {"messages": [{**USER, "content": "x" * 9000}]}, "messages", "9000 characters are more"),
        ("completions", {"prompt": "x" * 9000}, "prompt", "9000 characters are more"),
        ("completions", {"prompt": "x", "logit_bias": {"yes": 1}}, "logit_bias", 'as in {"50256": -100}'),
        ("completions", {"prompt": "x", "stop": ""}, "stop", "got one of 0 characters"),
        ("completions", {"prompt": "x", "stop_token_ids": [5, -1]}, "stop_token_ids", "token ids, got -1"),
        ("completions", {"prompt": "x", "stop_token_ids": [5] * 9999}, "stop_token_ids", "token ids, got 9999"),
        (
            "completions",
            {"prompt": "x", "guided_regex": "["},
            "structured_outputs",
            "regex parse error: unclosed character class",
        ),
        (
            "completions",
            {"prompt": "x", "response_format": {"type": "json_schema"}},
            "response_format",
            "the type 'json_schema' needs 'json_schema'",
        ),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.tool_calls", "at least 1"),
        ("chat/completions", {"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0", "'assistant' only"),
        ("chat/completions", {"messages": [USER], "top_logprobs": 2}, "top_logprobs", "needs 'logprobs': true"),
        ("embeddings", {"input": []}, "input", "expected a text, token ids"),
        ("embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format", "should match pattern"),
        ("embeddings", {"input": "x"}, "model", "gives no embeddings"),
    ],
)
def test_messages_say_what_is_expected(
    shared_runtime: RuntimeProcess, path: str, body: object, param: str | None, said: str
) -> None:
    error = shared_runtime.http.post(f"/v1/{path}", json=body).json()["error"]
    assert (error["param"], said in error["message"]) == (param, True), error


RAW = [
    ("broken JSON", b'{"prompt": "x"', "application/json", 400),
    ("not an object", b"[]", "application/json", 400),
    ("empty", b"", "application/json", 400),
    ("not UTF-8", b'{"prompt": "\xff\xfe"}', "application/json", 400),
    ("a lone surrogate", b'{"prompt": "\\ud800"}', "application/json", 400),
    ("not a number", b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
    ("nested too deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json", 400),
    ("another type", b'{"prompt": "x"}', "text/plain", 415),
    ("a form", b"prompt=x", "application/x-www-form-urlencoded", 415),
    ("a byte order of its own", '{"prompt": "x"}'.encode("utf-16"), "application/json", 400),
    ("too large", b'{"prompt": "' + b"x" * (9 << 20) + b'"}', "application/json", 413),
]


@pytest.mark.parametrize(("what", "body", "kind", "status"), RAW, ids=[r[0] for r in RAW])
def test_bad_bytes(shared_runtime: RuntimeProcess, what: str, body: bytes, kind: str, status: int) -> None:
    answer = shared_runtime.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert shared_runtime.complete(max_tokens=1).status_code == 200


def test_a_packed_body_is_refused_by_name(shared_runtime: RuntimeProcess) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = shared_runtime.http.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    plain = {**headers, "Content-Encoding": "identity"}
    assert shared_runtime.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=plain).status_code == 200


def raw_answer(runtime: RuntimeProcess, *pieces: bytes, to_the_end: bool = True) -> bytes:
    """Send pieces as they are, read nothing before all are sent, and return what comes until the server closes."""
    host, port = runtime.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(1 << 16), b"")) if to_the_end else b""


@pytest.mark.parametrize("length", [b"Content-Length: 16777216", b"Transfer-Encoding: chunked"])
def test_a_client_that_sends_all_before_it_reads_hears_that_it_is_too_much(
    shared_runtime: RuntimeProcess, length: bytes
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    body = [b" " * (1 << 20)] * 16
    if b"chunked" in length:
        body = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in body] + [b"0\r\n\r\n"]
    answer = raw_answer(shared_runtime, head, length + b"\r\n\r\n", *body)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 40], ids="in {} pieces".format)
def test_an_offer_of_http_2_is_declined_and_the_body_read(
    shared_runtime: RuntimeProcess, pieces: int, chunked: bool
) -> None:
    """Java's client and `curl --http2` offer it with their first request."""
    body = b'{"prompt": "x", "max_tokens": 5}'
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAAAA\r\n" + length
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + offer + b"\r\n\r\n"
    sent = post + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n"
    sent += get + offer.replace(length, b"") + b"\r\n" + get + b"Connection: close\r\n\r\n"  # and what follows it
    size = -(-len(sent) // pieces)
    answer = raw_answer(shared_runtime, *(sent[at : at + size] for at in range(0, len(sent), size)))
    assert answer.count(b"HTTP/1.1 200 OK") == 3, answer
    assert b'"completion_tokens":5' in answer
    assert answer.count(b'{"version":') == 2


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x00\xa5", b"FOO / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nnonsense\r\n\r\n"])
def test_what_is_not_http_gets_an_error_of_the_same_shape(shared_runtime: RuntimeProcess, said: bytes) -> None:
    head, _, body = raw_answer(shared_runtime, said).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_body_that_breaks_off_is_no_failure_of_the_server(shared_runtime: RuntimeProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    raw_answer(shared_runtime, head, b'{"prompt"', to_the_end=False)
    # its handler has run by the time that a later request on the same loop has been answered with tokens
    assert shared_runtime.complete(max_tokens=3).status_code == 200
    assert "ClientDisconnect" not in shared_runtime.log


WIDE = 3000  # wrong things in one body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [[]] * WIDE}),
        (CompletionRequest, {"prompt": [0.5] * WIDE}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * WIDE}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * WIDE}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {f"x{i}": "" for i in range(WIDE)}}),
        (CompletionRequest, {"prompt": "x", "structured_outputs": {"choice": [1] * WIDE}}),
        (CompletionRequest, {f"x{i}": 0 for i in range(WIDE)}),
        (ChatRequest, {"messages": [{}] * WIDE}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * WIDE}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * WIDE}]}),
        (ChatRequest, {"messages": [{f"x{i}": 0 for i in range(WIDE)}]}),
        (ChatRequest, {"messages": [USER], "tools": [0] * WIDE}),
        (TokenizeRequest, {"messages": [{}] * WIDE}),
        (DetokenizeRequest, {"tokens": [""] * WIDE}),
        (EmbeddingRequest, {"input": [{}] * WIDE}),
    ],
    ids=str,
)
def test_a_body_that_is_wrong_throughout_costs_no_more_than_its_first_fault(kind: type[BaseModel], body: dict) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert raised.value.error_count() < 10


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
OTHERS = ["user", "speed", "functions", "guided_json", "guided_regex"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), path=st.sampled_from(sorted(KINDS)))
def test_no_body_makes_it_fail(shared_runtime: RuntimeProcess, data: st.DataObject, path: str) -> None:
    kind, body = KINDS[path]
    names = [field.alias or name for name, field in kind.model_fields.items()]
    fields = data.draw(st.dictionaries(st.sampled_from(names + OTHERS), ANY, max_size=4))
    answer = shared_runtime.http.post(
        path, content=json.dumps({**body, **fields}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code < 500, answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]


def test_a_chunked_body_is_counted(shared_runtime: RuntimeProcess) -> None:
    def parts():
        for _ in range(10):
            yield b" " * (1 << 20)

    answer = shared_runtime.http.post("/v1/completions", content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers", [{"X-Request-Priority": "high"}, {"X-Request-Timeout": "soon"}, {"X-Request-Timeout": "-1"}]
)
def test_bad_headers(shared_runtime: RuntimeProcess, headers: dict[str, str]) -> None:
    answer = shared_runtime.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing"])
def test_unknown_paths(shared_runtime: RuntimeProcess, path: str) -> None:
    answer = shared_runtime.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_slot(shared_runtime: RuntimeProcess) -> None:
    before = shared_runtime.metric("paceline_requests_total", outcome="aborted")
    with shared_runtime.stream(max_tokens=8000) as response:
        next(events(response))
    eventually(lambda: shared_runtime.metric("paceline_requests_total", outcome="aborted") == before + 1, "it is aborted")
    gauges = shared_runtime.gauges()
    assert (gauges["running"], gauges["waiting"], gauges["kvBlocksUsed"]) == (0, 0, 0)


async def test_a_client_that_leaves_without_a_stream_frees_its_slot(shared_runtime: RuntimeProcess) -> None:
    before = shared_runtime.metric("paceline_requests_total", outcome="aborted")
    async with httpx.AsyncClient(base_url=shared_runtime.url, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 8000}))
        await asyncio.to_thread(eventually, lambda: shared_runtime.gauges()["running"] == 1, "it runs")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    eventually(lambda: shared_runtime.metric("paceline_requests_total", outcome="aborted") == before + 1, "it is aborted")
    assert shared_runtime.gauges()["running"] == 0


def test_a_client_that_does_not_read_stalls_nobody(shared_runtime: RuntimeProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3000, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(shared_runtime.url.rsplit(":", 1)[1])))
        finished = shared_runtime.metric("paceline_requests_total", outcome="finished")
        deaf.sendall(head.encode() + body)
        eventually(lambda: shared_runtime.gauges()["running"] == 1, "it runs")
        assert shared_runtime.complete(max_tokens=50).status_code == 200
        # the engine finishes it, although nobody has read a byte
        eventually(
            lambda: shared_runtime.metric("paceline_requests_total", outcome="finished") == finished + 2, "both are finished"
        )


def test_a_full_queue_says_when_to_come_back(start_runtime) -> None:
    runtime = start_runtime("--max-num-seqs", "1", "--max-queue-len", "1", model=SLOW)
    with runtime.stream(max_tokens=5000) as running, httpx.Client(base_url=runtime.url, timeout=60) as other:
        tokens = events(running)  # kept: an iterator that is dropped closes the stream
        next(tokens)
        waiting = threading.Thread(target=lambda: other.post("/v1/completions", json={"prompt": "y", "max_tokens": 1}))
        waiting.start()
        eventually(lambda: runtime.gauges()["waiting"] == 1, "the second request waits")
        with httpx.Client(base_url=runtime.url) as third:
            refused = third.post("/v1/completions", json={"prompt": "z"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        running.close()
        waiting.join()
    assert runtime.metric("paceline_requests_total", outcome="rejected") == 1


def test_a_deadline_that_passes_in_the_queue(start_runtime) -> None:
    # it waits for a second one that never comes, which no forecast can know
    runtime = start_runtime("--max-num-seqs", "2", "--batching-strategy", "static", "--static-flush", "never")
    answer = runtime.http.post("/v1/completions", json={"prompt": "y"}, headers={"X-Request-Timeout": "300ms"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    eventually(lambda: runtime.gauges()["waiting"] == 0, "the hopeless request has left the queue")


def test_a_lower_priority_number_goes_first(start_runtime) -> None:
    runtime = start_runtime("--max-num-seqs", "1", "--batching-strategy", "iteration", model=SLOW)
    order: list[str] = []

    def ask(name: str) -> None:
        with httpx.Client(base_url=runtime.url, timeout=60) as client:
            client.post(
                "/v1/completions", json={"prompt": name, "max_tokens": 2}, headers={"X-Request-Priority": name}
            ).raise_for_status()
            order.append(name)

    with runtime.stream(max_tokens=5000) as running:
        tokens = events(running)  # kept: an iterator that is dropped closes the stream
        next(tokens)
        threads = []
        for number, name in enumerate(("5", "-1"), start=1):
            threads.append(threading.Thread(target=ask, args=(name,)))
            threads[-1].start()
            eventually(lambda n=number: runtime.gauges()["waiting"] == n, "it waits")
    for thread in threads:
        thread.join()
    assert order == ["-1", "5"]


def test_metrics_carry_vllm_names(shared_runtime: RuntimeProcess) -> None:
    shared_runtime.complete(max_tokens=5).raise_for_status()
    text = shared_runtime.http.get("/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_count", "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds_sum", "vllm:num_preemptions_total", "vllm:cache_config_info",
        "paceline_slot_steps_total", "paceline_slot_steps_busy_total", "paceline_steps_total", "paceline_step_seconds_count",
        "paceline_knob_epoch", "paceline_knob_revision", "paceline_requests_total",
    ):  # fmt: skip
        assert f'{name}{{engine="0",' in text.replace("{block_size", '{engine="0",block_size'), name
    assert shared_runtime.metric("vllm:generation_tokens_total") >= 5


def test_openapi_names_the_bodies(shared_runtime: RuntimeProcess) -> None:
    document = shared_runtime.http.get("/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert {"prompt", "max_tokens", "user", "suffix"} <= named["properties"].keys()
