"""The engine's tokens on the device against `transformers`': graphs, look-ahead, chunks of prompts."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch
from bench.gpu.context import Context
from bench.gpu.engine import greedy, knobs
from bench.gpu.load import hugging_face
from bench.gpu.models import build
from bench.gpu.sizes import QWEN3_06B

from paceline_core.request import Request
from paceline_runtime.model_config import ModelConfig, RopeConfig

NEAR_TIE = 1e-3  # two logits closer than this may swap between two correct float32 computations


def run(context: Context) -> None:
    """Compare greedy tokens in float32."""
    dry = context.sizes.dry
    count, new = (2, 2) if dry else (12, 24)
    sizes = replace(context.sizes, dtype=torch.float32, batches=(1, 2) if dry else (1, 4, 8), max_len=64 if dry else 1024)
    reference = hugging_face(sizes, _shape(dry))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(6)  # keeps the ranks of logits apart
    model = build(sizes, _shape(dry), max_seqs=max(sizes.batches), weights=_Weights(reference))
    context.sizes = sizes
    engine = model.engine(knobs(context, max(sizes.batches), max_num_batched_tokens=16 if dry else 256))
    numbers = random.Random(3)
    prompts = [numbers.choices(range(model.vocab_size), k=numbers.randint(2, 8 if dry else 600)) for _ in range(count)]
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in range(count)}
    for seq_id, prompt in enumerate(prompts):
        engine.add(Request(seq_id, len(prompt), new, time.monotonic(), tokens=prompt), greedy(new))
    while engine.has_work:
        for seq_id, tokens in engine.turn().tokens.items():
            outputs[seq_id].extend(tokens)
    for seq_id, prompt in enumerate(prompts):
        context.put(
            "tokens", sequence=seq_id, prompt=len(prompt), **_compare(reference, prompt, outputs[seq_id], sizes.device)
        )


def _shape(dry: bool) -> ModelConfig:
    sizes = (97, 32, 32, 1, 2, 1, 16) if dry else (1999, 512, 1024, 4, 8, 2, 64)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    plain = {"qk_norm": False, "ropes": (RopeConfig(10_000.0),), "tie_embeddings": False, "layers": ()}
    return replace(QWEN3_06B, **plain, **dict(zip(names, sizes, strict=True)))  # type: ignore[arg-type]


class _Weights:
    def __init__(self, model: Any) -> None:
        self._tensors = model.state_dict()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found: torch.Tensor = self._tensors[name]
        assert tuple(found.shape) == shape, name
        return found


def _compare(reference: Any, prompt: list[int], output: list[int], device: torch.device) -> dict[str, object]:
    """Score the output by the reference's logits: each token must be its best one, or as good as that."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output], device=device)).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
    behind = (logits.max(-1).values - chosen).max()
    return {"tokens": len(output), "largest_gap": float(behind), "good": bool(behind < NEAR_TIE)}
