"""Made-up services for `bench.tuner_fleet`: devices, traffic that shifts half-way, objectives, starts, and lies."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paceline_core.knobs import Knobs
from paceline_core.step_time import StepModel
from paceline_core.uneven import UnevenDevice
from paceline_sim.generate import Lengths, bursty
from paceline_sim.trace import Trace, TraceRequest

PODS = 2
NUM_BLOCKS = 12_000  # 192,000 tokens
MAX_MODEL_LEN = 1 << 20
VLLM = Knobs(max_num_seqs=256, max_num_batched_tokens=8192)
STARTS = {
    "vllm": VLLM,
    "one": Knobs(max_num_seqs=1, max_num_seqs_limit=512),
    "huge": Knobs(max_num_seqs=512, max_num_seqs_limit=512, max_num_batched_tokens=32_768),
}
_KINDS = {  # prompt and output lengths
    "chat": ({50: 120, 95: 600, 100: 1500}, {50: 140, 95: 420, 100: 800}),
    "assistant": ({50: 900, 95: 3000, 100: 6000}, {50: 160, 95: 450, 100: 900}),
    "summary": ({50: 2500, 95: 6000, 100: 9000}, {50: 90, 95: 200, 100: 300}),
    "code": ({50: 600, 95: 2500, 100: 5000}, {50: 260, 95: 700, 100: 1200}),
}


@dataclass(frozen=True, slots=True)
class MadeUpService:
    """One service of the fleet. `lie`: '' (honest), 'doubled' (the published model is twice the truth) or 'frozen'."""

    name: str
    device: UnevenDevice
    start: str
    ttft: float
    tpot: float
    kinds: tuple[str, str]
    rates: tuple[float, float]
    half: float
    lie: str

    def traffic(self, pod: int) -> Trace:
        """Return what one pod gets: two kinds of traffic, one after the other."""
        requests: list[TraceRequest] = []
        for part, (kind, rate) in enumerate(zip(self.kinds, self.rates, strict=True)):
            prompts, outputs = (Lengths(points, least=8) for points in _KINDS[kind])
            seed = f"{self.name}/{pod}/{part}"
            trace = bursty(
                rate, self.half, prompts, outputs, burst=1.5, every=300.0, seed=random.Random(seed).getrandbits(32)
            )
            requests += [r.at(r.arrival + part * self.half) for r in trace.requests]
        return Trace(tuple(requests))


def made_up(number: int, hours: float) -> MadeUpService:
    """Return service `number` of the fleet; every seventh tells lies about its steps."""
    rng = random.Random(number)
    scale = rng.uniform(3.0, 8.0)
    base = StepModel(0.011 * scale, 2.2e-4 * scale, 5.5e-5 * scale, 1.6e-7 * scale, 6e-10 * scale)
    device = UnevenDevice(
        base, rng.choice((4, 8, 16)), rng.choice((32, 64, 128)), rng.choice((2e4, 4e4, 8e4)), rng.uniform(1.5, 3)
    )
    kinds = tuple(rng.sample(sorted(_KINDS), 2))
    rates = tuple(rng.uniform(0.5, 0.95) / _cost(device, kind) for kind in kinds)
    lie = ("doubled", "frozen")[number % 2] if number % 7 == 6 else ""
    start = "vllm" if lie else ("vllm", "vllm", "one", "vllm", "huge")[number % 5]
    ttft, tpot = rng.choice((3.0, 5.0, 9.0)), scale * rng.choice((0.022, 0.03, 0.045))
    return MadeUpService(f"s{number:02d}", device, start, ttft, tpot, kinds, rates, hours * 1800.0, lie)


def _cost(device: UnevenDevice, kind: str) -> float:
    """Return the seconds of a device that a request of this kind takes, in batches of 24 decodes."""
    prompt, output = (sum(points.values()) / len(points) * 0.6 for points in _KINDS[kind])
    base = device.base
    decode = base.constant / 24 + base.decode_tokens + base.context_tokens * (prompt + output / 2) * device.context_factor
    return output * decode + prompt * base.prefill_tokens
