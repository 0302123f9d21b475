"""`/v1/embeddings`: a prompt's pooled hidden states, computed by the same steps as everything else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from paceline_runtime.api_errors import ApiError, invalid
from paceline_runtime.api_schema import EmbeddingRequest, flat_prompts
from paceline_runtime.generation import Generation
from paceline_runtime.sampling_params import SamplingParams
from paceline_runtime.service import CallOptions, Job, Service

__all__ = ["embedding_reply", "start_embedding"]


async def start_embedding(service: Service, body: EmbeddingRequest, options: CallOptions) -> list[Generation]:
    """Start a generation of one token for each input: what is wanted is known with the first. Raises `ApiError`."""
    tokenizer = service.admit(body.model, options)
    inputs = flat_prompts(body.input)
    prompts = [await service.prompt_ids(tokenizer, given, "input") for given in inputs]
    pooling: Literal["last", "mean"] = "mean" if body.pooling == "mean" else "last"
    params = SamplingParams(max_tokens=1, temperature=0, pooling=pooling)
    for prompt in prompts:
        service.room(prompt, 1, "input")
    return service.start(tokenizer, [Job(prompt, params) for prompt in prompts], options)


def embedding_reply(model: str, body: EmbeddingRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the answer, when every generation has ended. Raises `ApiError` if the model gives none (a clock)."""
    data = []
    for index, generation in enumerate(generations):
        if not generation.embedding:
            raise ApiError(400, "this model gives no embeddings", code="unsupported_model", param="model")
        vector = np.frombuffer(generation.embedding, np.float32)
        data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, body)})
    prompt = sum(generation.prompt_tokens for generation in generations)
    usage = {"prompt_tokens": prompt, "total_tokens": prompt}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(vector: np.ndarray[Any, np.dtype[np.float32]], body: EmbeddingRequest) -> str | list[float]:
    if body.dimensions not in (None, len(vector)):
        raise invalid(f"this model's embeddings have {len(vector)} dimensions, and no other number", "dimensions")
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
