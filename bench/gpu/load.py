"""One load of mixed lengths, all at once: every strategy here, Hugging Face's `generate` and continuous batching beside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu.context import Context
from bench.gpu.engine import greedy, knobs
from bench.gpu.models import build
from bench.gpu.sizes import Sizes
from bench.gpu.timing import synchronise

from paceline_core.knobs import Strategy
from paceline_core.request import Request
from paceline_runtime.model_config import ModelConfig


@dataclass(frozen=True)
class Asked:
    """A prompt and how many tokens are wanted."""

    prompt: list[int]
    output: int


def asked(sizes: Sizes, vocabulary: int) -> list[Asked]:
    """Return the load, the same for everybody: even prompt lengths, and outputs of which most are short and some long."""
    numbers = random.Random(20)
    low, high = sizes.load_output
    load = []
    for _ in range(sizes.requests):
        prompt = numbers.choices(range(vocabulary), k=numbers.randint(*sizes.load_prompt))
        load.append(Asked(prompt, low + int((high - low) * numbers.random() ** 2)))
    return load


def run_ours(context: Context, name: str) -> None:
    """Run the load under every strategy."""
    sizes = context.sizes
    model = build(sizes, sizes.models[name], max_seqs=max(sizes.batches))
    load = asked(sizes, model.vocab_size)
    first = 1
    for strategy in (Strategy.CONTINUOUS, Strategy.ITERATION, Strategy.DYNAMIC, Strategy.STATIC):
        engine = model.engine(knobs(context, sizes.slots, strategy=strategy, max_queue_delay=0.01))
        synchronise(sizes.device)
        began, tokens = time.perf_counter(), 0
        for seq_id, each in enumerate(load, first):
            request = Request(seq_id, len(each.prompt), each.output, time.monotonic(), tokens=each.prompt)
            engine.add(request, greedy(each.output))
        engine.close_source()
        while engine.has_work:
            tokens += sum(map(len, engine.turn().tokens.values()))
            if (wait := engine.wait()) and engine.has_work:
                time.sleep(wait)
        context.put("load", **_row(f"Paceline, {strategy.value}", sizes, load, time.perf_counter() - began, tokens))
        model.forget()
        first += len(load)


def _row(engine: str, sizes: Sizes, load: Sequence[Asked], seconds: float, tokens: int) -> dict[str, object]:
    wanted = sum(each.output for each in load)
    return {"engine": engine, "slots": sizes.slots, "requests": len(load), "wanted_tokens": wanted, "tokens": tokens,
            "seconds": seconds, "wanted_tokens_per_s": wanted / seconds}  # fmt: skip


def run_peers(context: Context, name: str) -> None:
    """Run the load with `transformers`; what it can't do here is a row too."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = hugging_face(context.sizes, context.sizes.models[name])
    for peer, serve in (("Hugging Face generate, static", _static), ("Hugging Face continuous batching", _continuous)):
        try:
            load = asked(context.sizes, context.sizes.models[name].vocab_size)
            seconds, tokens = serve(context.sizes, model, load)
            context.put("load", **_row(peer, context.sizes, load, seconds, tokens))
        except Exception as error:  # noqa: BLE001 - a peer that doesn't run here is no fault of ours, but must be seen
            context.put("failed", engine=peer, error=f"{type(error).__name__}: {error}"[:500])


def hugging_face(sizes: Sizes, config: ModelConfig) -> Any:
    """Return a random Llama of the shape of `config` in `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_kv_heads, max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps, tie_word_embeddings=config.tie_embeddings, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": config.ropes[0].theta}, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(sizes.device):
        model = LlamaForCausalLM(shape).to(sizes.dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _static(sizes: Sizes, model: Any, load: Sequence[Asked]) -> tuple[float, int]:
    """Batches of as many as there are slots, padded on the left; each runs until its longest output is done."""
    _generate(model, load[:2], sizes, 4)
    synchronise(sizes.device)
    began, tokens = time.perf_counter(), 0
    for first in range(0, len(load), sizes.slots):
        batch = load[first : first + sizes.slots]
        tokens += _generate(model, batch, sizes, max(each.output for each in batch))
    synchronise(sizes.device)
    return time.perf_counter() - began, tokens


def _generate(model: Any, batch: Sequence[Asked], sizes: Sizes, count: int) -> int:
    width = max(len(each.prompt) for each in batch)
    ids = torch.tensor([[0] * (width - len(each.prompt)) + each.prompt for each in batch], device=sizes.device)
    mask = torch.tensor([[0] * (width - len(e.prompt)) + [1] * len(e.prompt) for e in batch], device=sizes.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return int(out[:, width:].numel())


def _continuous(_sizes: Sizes, model: Any, load: Sequence[Asked]) -> tuple[float, int]:
    """`transformers`' own manager with its defaults, on torch's attention (its flash kernels need a download)."""
    from transformers import GenerationConfig

    longest = max(each.output for each in load)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation("paged|sdpa")
    left, tokens = len(load), 0
    with model.continuous_batching_context_manager(generation_config=config, timeout=5) as manager:
        began = time.perf_counter()
        for each in load:
            manager.add_request(each.prompt, max_new_tokens=each.output)
        while left:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                left, tokens = left - 1, tokens + len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("its worker ended before the load did")
        seconds = time.perf_counter() - began
    return seconds, tokens
