"""Tokens, embeddings and models: what needs no sampling."""

from __future__ import annotations

import base64
import math
import struct

import openai
import pytest
import torch
from conformance_kit import Served

PROMPT = "The lazy dog waits for its tokens, é 速 🎼, and then for three more words of a long enough prompt"


def embedded(served: Served, ids: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = served.model.model(torch.tensor([ids])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return vector / vector.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_models_hidden_states(served: Served, client: openai.OpenAI, pooling: str) -> None:
    """Twice: the second time the prompt is in the prefix cache."""
    for _ in range(2):
        answer = client.embeddings.create(model="tiny", input=[PROMPT, "short"], extra_body={"pooling": pooling})
        for item, text in zip(answer.data, [PROMPT, "short"], strict=True):
            expected = embedded(served, served.ids(text), pooling)
            assert torch.tensor(item.embedding) == pytest.approx(expected, abs=1e-3)
    assert answer.usage.prompt_tokens == len(served.ids(PROMPT)) + len(served.ids("short"))


def test_embeddings_as_floats_and_base64_are_the_same(served: Served, client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="tiny", input=served.ids(PROMPT), encoding_format="float").data[0].embedding
    raw = served.runtime.http.post("/v1/embeddings", json={"input": PROMPT, "encoding_format": "base64"}).json()
    data = base64.b64decode(raw["data"][0]["embedding"])
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(floats, abs=1e-5)
    assert math.fsum(x * x for x in floats) == pytest.approx(1, abs=1e-5)
    assert client.embeddings.create(model="tiny", input=PROMPT, dimensions=len(floats)).data
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="tiny", input=PROMPT, dimensions=7)


def test_tokenize_and_detokenize(served: Served) -> None:
    http = served.runtime.http
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == served.ids(PROMPT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_health_answers_heads(served: Served) -> None:
    for path in ("/health/live", "/health/ready"):
        answer = served.runtime.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
