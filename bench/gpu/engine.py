"""The engine end to end on one model: decode rates over batch sizes, prefill, and how long the GPU waits between steps."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench.gpu.context import Context
from bench.gpu.models import BenchModel, build
from bench.gpu.timing import synchronise

from paceline_core.knobs import Knobs
from paceline_core.request import Request
from paceline_runtime.engine import Engine
from paceline_runtime.sampling_params import SamplingParams

_ids = itertools.count(1)


def run(context: Context, name: str) -> None:
    """Measure model `name`; what fails is a row too."""
    sizes = context.sizes
    began = time.perf_counter()
    model = build(sizes, sizes.models[name], max_seqs=max(sizes.batches))
    synchronise(sizes.device)
    context.put("load", model=model.config.architecture, seconds=time.perf_counter() - began, kv_blocks=model.num_blocks,
                arithmetic=None if model.budget is None else model.budget.describe(model.num_blocks, 16))  # fmt: skip
    for batch in sizes.batches:
        context.put("decode", **_decode(context, model, batch, greedy()))
    sampled = SamplingParams(max_tokens=10_000, temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)
    context.put("decode", **_decode(context, model, sizes.slots, sampled), sampling="temperature 0.8, top_p 0.95")
    for tokens in sorted({sizes.prefill_tokens // 4, sizes.prefill_tokens}):
        context.put("prefill", **_prefill(context, model, tokens))
    for batch in (1, sizes.slots):
        context.put("idle", batch=batch, **_idle(context, model, batch))
    model.runner.close()


def greedy(tokens: int = 10_000) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def knobs(context: Context, seqs: int, **changes: object) -> Knobs:
    """Return knobs for `seqs` sequences at once; prompts differ, so nothing is cached."""
    values = {
        "max_num_seqs": seqs,
        "max_num_seqs_limit": max(context.sizes.batches),
        "max_num_batched_tokens": max(context.sizes.prefill_tokens, seqs),
        "long_prefill_threshold": context.sizes.prefill_tokens,
        "prefix_caching": False,
    }
    return Knobs(**(values | changes))  # type: ignore[arg-type]


def add(engine: Engine, model: BenchModel, length: int, params: SamplingParams) -> int:
    """Give the engine a random prompt and return its id."""
    seq_id = next(_ids)
    prompt = random.Random(seq_id).choices(range(model.vocab_size), k=length)
    limit = min(params.max_tokens, model.max_model_len - length)
    request = Request(seq_id, length, limit, time.monotonic(), tokens=prompt)
    engine.add(request, params)
    return seq_id


@contextmanager
def decoding(context: Context, model: BenchModel, batch: int, params: SamplingParams) -> Iterator[Engine]:
    """An engine in which `batch` sequences do nothing but decode."""
    engine = model.engine(knobs(context, batch))
    ids = [add(engine, model, context.sizes.prompt, params) for _ in range(batch)]
    seen: set[int] = set()
    while len(seen) < batch:
        seen.update(engine.turn().tokens)
    for _ in range(2):  # the steps in flight are plain decodes then
        engine.turn()
    yield engine
    for seq_id in ids:
        engine.abort(seq_id)
    while engine.has_work:
        engine.turn()
    model.forget()


def _decode(context: Context, model: BenchModel, batch: int, params: SamplingParams) -> dict[str, object]:
    sizes, tokens = context.sizes, 0
    with decoding(context, model, batch, params) as engine:
        began = time.perf_counter()
        for _ in range(sizes.decode_steps):
            tokens += sum(map(len, engine.turn().tokens.values()))
        step = (time.perf_counter() - began) / sizes.decode_steps
    length = sizes.prompt + sizes.decode_steps / 2
    moved = model.read_bytes + batch * length * model.kv_bytes
    return {
        "batch": batch,
        "tokens_per_s": tokens / (step * sizes.decode_steps),
        "step_ms": step * 1000,
        "mbu": moved / step / context.rate("copy_bytes_per_s"),
    }


def _prefill(context: Context, model: BenchModel, tokens: int) -> dict[str, object]:
    """Time one prompt that is one step, its median of a few."""
    took = []
    for _ in range(1 if context.sizes.dry else 5):
        engine = model.engine(knobs(context, 1))
        add(engine, model, tokens, greedy(1))
        synchronise(context.sizes.device)
        began = time.perf_counter()
        while engine.has_work:
            engine.turn()
        took.append(time.perf_counter() - began)
        model.forget()
    seconds = sorted(took)[len(took) // 2]
    c = model.config
    weights = model.read_bytes / model.decoder.dtype.itemsize - c.vocab_size * c.hidden_size  # only the last row has logits
    work = 2 * tokens * weights + 2 * tokens**2 * c.num_heads * c.head_dim * c.num_layers
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "milliseconds": seconds * 1000,
        "tflop_per_s": work / seconds / 1e12,
        "mfu": work / seconds / context.rate("product_flop_per_s"),
    }


def _idle(context: Context, model: BenchModel, batch: int) -> dict[str, object]:
    """Return the share of a stretch of decode steps in which no kernel and no copy runs, as the profiler saw it."""
    if context.sizes.device.type != "cuda":
        return {"share": None, "note": "needs a GPU"}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with decoding(context, model, batch, greedy()) as engine, profiler as profile:
        for _ in range(24):
            engine.turn()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return {"share": idle_share(spans), "spans": len(spans), "steps": 24}


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Return how much of the time from the first start to the last end no span covers; None without spans."""
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])
