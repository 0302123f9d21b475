"""Made-up services for `bench.tuner_fleet`: devices, traffic that shifts half-way, objectives, starts, and lies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, partial

from paceline_core.knobs import Knobs
from paceline_core.step_time import StepModel
from paceline_core.uneven import UnevenDevice
from paceline_sim.generate import Lengths, bursty
from paceline_sim.trace import Trace, TraceRequest

PODS = 2
FROZEN_AFTER = 120.0  # seconds: then the figures of those services that tell such lies stand still
MAX_MODEL_LEN = 1 << 20
VLLM = Knobs(max_num_seqs=256, max_num_batched_tokens=8192)
STARTS = {
    "vllm": VLLM,
    "one": Knobs(max_num_seqs=1, max_num_seqs_limit=512),
    "timid": Knobs(max_num_seqs=4, max_num_batched_tokens=512),
    "huge": Knobs(max_num_seqs=512, max_num_seqs_limit=512, max_num_batched_tokens=32_768),
}
_KINDS = {  # prompt and output lengths
    "chat": ({50: 120, 95: 600, 100: 1500}, {50: 80, 95: 260, 100: 400}),
    "code": ({50: 600, 95: 2500, 100: 5000}, {50: 160, 95: 450, 100: 700}),
    "agent": ({50: 2500, 95: 6000, 100: 9000}, {50: 150, 95: 450, 100: 700}),
    "rag": ({50: 1800, 95: 4000, 100: 6000}, {50: 120, 95: 300, 100: 500}),
    "summary": ({50: 2500, 95: 6000, 100: 9000}, {50: 60, 95: 150, 100: 250}),
    "mixed": ({50: 150, 80: 400, 90: 4000, 100: 9000}, {50: 80, 95: 250, 100: 400}),  # chat with a long prompt now and then
}
_POOLS = (1.5, 3, 6)  # the KV cache holds so many times the sequences that a device serves best: from scarce to plenty
_BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class MadeUpService:
    """One service of the fleet. `lie`: '' (honest), 'doubled' (the published model is twice the truth) or 'frozen'."""

    name: str
    device: UnevenDevice
    blocks: int
    start: str
    ttft: float
    tpot: float
    kinds: tuple[str, str]
    rates: tuple[float, float]
    burst: float
    half: float
    lie: str

    def traffic(self, pod: int) -> Trace:
        """Return what one pod gets: two kinds of traffic, one after the other."""
        requests: list[TraceRequest] = []
        for part, (kind, rate) in enumerate(zip(self.kinds, self.rates, strict=True)):
            prompts, outputs = (Lengths(points, least=8) for points in _KINDS[kind])
            seed = random.Random(f"{self.name}/{pod}/{part}").getrandbits(32)
            trace = bursty(rate, self.half, prompts, outputs, burst=self.burst, every=300.0, seed=seed)
            requests += [r.at(r.arrival + part * self.half) for r in trace.requests]
        return Trace(tuple(requests))


def made_up(number: int, hours: float) -> MadeUpService:
    """Return service `number` of the fleet; every seventh tells lies about its steps.

    A step takes 11 to 22 ms beside what is in it, as those of models of some billion weights do on a GPU; so a service gets
    0.5 to 20 requests per second (the hour of the Azure trace 2023 has 5). It computes in tiles, and some of that is hidden
    behind reading, or the other way round: nothing that the tuner fits can say so. Reading context gets 5 to 10 times dearer
    beyond a knee, as when it leaves a cache: a batch that is too large serves less, not more, and a burst of 2 to 4 times
    the rate that makes it so may never end. Objectives for time per token are 1.25 to 1.7 times what the best batch takes
    beside the prompts that come with it, so that large budgets hurt, too; those for the first token leave room for a short
    queue. KV pools are scarce.
    """
    rng = random.Random(number)
    scale = rng.uniform(1.0, 2.0)
    base = StepModel(0.011 * scale, 2.2e-4 * scale, 5.5e-5 * scale, 5e-7 * scale, 6e-10 * scale)
    tiles, knee = (rng.choice((4, 8, 16)), rng.choice((32, 64, 128))), rng.choice((8e3, 1.6e4, 3.2e4))
    overlap = random.Random(f"overlap {number}").uniform(0.2, 0.8)
    device = UnevenDevice(base, *tiles, knee, rng.uniform(5, 10), overlap)
    kinds = tuple(rng.sample(sorted(_KINDS), 2))
    rates = tuple(rng.uniform(0.35, 0.6) / min(_cost(device, kind, batch) for batch in _BATCHES) for kind in kinds)
    lie = ("doubled", "frozen")[number % 2] if number % 7 == 6 else ""
    start = "vllm" if lie else ("vllm", "timid", "one", "vllm", "huge")[number % 5]
    ttft, tpot = rng.choice((4.0, 8.0, 12.0)), rng.uniform(1.25, 1.7) * max(map(partial(_pace, device), kinds, rates))
    tokens = rng.choice(_POOLS) * max(_best_batch(device, kind) * sum(_means(kind)) for kind in kinds)
    blocks, burst = max(1000, round(tokens / 16)), rng.choice((2.0, 3.0, 4.0))
    return MadeUpService(f"s{number:02d}", device, blocks, start, ttft, tpot, kinds, rates, burst, hours * 1800.0, lie)


@cache
def _means(kind: str) -> tuple[float, float]:
    """Return about the mean prompt and output length."""
    prompts, outputs = (Lengths(points, least=8) for points in _KINDS[kind])
    rng = random.Random(0)
    return sum(prompts.draw(rng) for _ in range(1000)) / 1000, sum(outputs.draw(rng) for _ in range(1000)) / 1000


def _step(device: UnevenDevice, kind: str, batch: int) -> float:
    """Return the seconds of a step of a batch of decodes."""
    prompt, output = _means(kind)
    return device.predict_decode(batch, round(batch * (prompt + output / 2)))


def _cost(device: UnevenDevice, kind: str, batch: int) -> float:
    """Return the seconds of a device that a request of this kind takes, in batches of this size."""
    prompt, output = _means(kind)
    return output * _step(device, kind, batch) / batch + prompt * device.base.prefill_tokens


def _best_batch(device: UnevenDevice, kind: str) -> int:
    return min(_BATCHES, key=lambda batch: _cost(device, kind, batch))


def _pace(device: UnevenDevice, kind: str, rate: float) -> float:
    """Return the mean seconds per token of the best batch beside the prompts of `rate` requests per second."""
    prompts = rate * _means(kind)[0] * device.base.prefill_tokens
    return _step(device, kind, _best_batch(device, kind)) / (1.0 - prompts)
