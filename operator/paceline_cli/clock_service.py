"""A service on clock pods: the real server, scheduler and admin port on a modelled device, for tuning without a GPU."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline_cli.load import Outcome, run_load
from paceline_cli.tuned_service import tuned_service
from paceline_cli.workload import LoadRequest

__all__ = ["SLO_TPOT", "SLO_TTFT", "Sent", "Traffic", "clock_manifest", "write_device"]

# a small GPU's worth of an 8B model: 12 ms for the weights, batches in tiles of eight, dearer context beyond 20,000 tokens
_DEVICE = {
    "constant": 0.012, "decodeTokens": 2e-4, "prefillTokens": 6e-5, "contextTokens": 2.5e-7, "prefillAttention": 1e-9,
    "uneven": {"batchTile": 8, "prefillTile": 64, "contextKnee": 20_000, "contextFactor": 2.0},
}  # fmt: skip
SLO_TTFT, SLO_TPOT = 1.0, 0.08  # seconds
_CHUNK = 1.0  # seconds of traffic that are sent as one batch of tasks
# words of one token each; prompts drawn from them differ in their first block, so that no prefix cache spares their prefill
_WORDS = ("wind", "road", "hill", "turn", "line", "front", "pace", "group", "day", "rain", "tail", "gap", "leader", "hour")


def write_device(folder: Path, device: Mapping[str, Any] = _DEVICE) -> Path:
    """Write a modelled device's step times and return the file."""
    path = folder / "device.json"
    path.write_text(json.dumps(device), encoding="utf-8")
    return path


def clock_manifest(
    name: str, device: Path, *, replicas: int, knobs: Mapping[str, Any], mode: str = "Auto",
    slo: tuple[float, float] = (SLO_TTFT, SLO_TPOT),
) -> dict[str, Any]:  # fmt: skip
    """Return the InferenceService of a clock service with `knobs` and an SLO (TTFT and TPOT in seconds), for a stack whose
    policy allows templates.
    """
    service = tuned_service(
        name, replicas=replicas, knobs=knobs, mode=mode, slo=slo, max_model_len=8192,
        requests={"cpu": "100m", "memory": "256Mi"}, limits={"cpu": "1", "memory": "1Gi"},
    )  # fmt: skip
    # of the model only its tokenizer is read
    command = ["paceline-runtime", "--device", "clock", "--step-model", str(device)]
    service["spec"]["template"] = {"spec": {"containers": [{"name": "runtime", "command": command}]}}
    return service


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as its client saw it; `at` is in seconds since the traffic began, `slo` its TTFT and TPOT objective."""

    at: float
    outcome: Outcome
    slo: tuple[float, float] = (SLO_TTFT, SLO_TPOT)

    @property
    def good(self) -> bool:
        """Whether it was answered within the objective."""
        ttft, tpot = self.outcome.ttft, self.outcome.tpot
        late = ttft is None or ttft > self.slo[0] or (tpot is not None and tpot > self.slo[1])
        return not self.failed and not late

    @property
    def failed(self) -> bool:
        """Whether it was answered with an error, or not at all."""
        return bool(self.outcome.error)

    @property
    def error(self) -> str:
        """What it was told instead of an answer; empty if it was answered."""
        return self.outcome.error


class Traffic:
    """Open-loop traffic from a thread of its own, until it is stopped: nobody waits for an answer before sending.

    `rate` (requests/s), `prompts` and `outputs` (ranges of tokens) are functions of the seconds since it began. The first
    `skipped` seconds aren't sent: what is sent is then the rest of the same requests.
    """

    def __init__(
        self, url: str, model: str, rate: Callable[[float], float], prompts: Callable[[float], tuple[int, int]],
        outputs: Callable[[float], tuple[int, int]] = lambda _: (40, 80), seed: int = 0,
        slo: tuple[float, float] = (SLO_TTFT, SLO_TPOT), skipped: int = 0,
    ) -> None:  # fmt: skip
        self._skipped = skipped
        self._url, self._model, self._rate, self._prompts, self._outputs = url, model, rate, prompts, outputs
        self._random = random.Random(seed)  # noqa: S311  traffic, not secrets
        self._slo = slo
        self._done: list[Sent] = []
        self._stopped = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def sent(self) -> Sequence[Sent]:
        """What was answered so far."""
        return tuple(self._done)

    async def _send(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        begin = 0.0
        for second in range(self._skipped):
            self._chunk(float(second))
        while not self._stopped.is_set():
            chunk = self._chunk(self._skipped + begin)
            tasks.add(asyncio.create_task(self._run(begin, chunk)))
            begin += _CHUNK
            await asyncio.sleep(max(0.0, begin - self.seconds))
        await asyncio.gather(*tasks)

    async def _run(self, begin: float, chunk: Sequence[LoadRequest]) -> None:
        late = max(0.0, self.seconds - begin)  # a busy machine: what is late is sent at once, and counts from then
        outcomes = await run_load(self._url, self._model, [replace(r, at=max(0.0, r.at - late)) for r in chunk])
        self._done += [Sent(begin + late + o.sent, o, self._slo) for o in outcomes]

    def _chunk(self, begin: float) -> list[LoadRequest]:
        requests, at = [], self._random.expovariate(self._rate(begin))
        while at < _CHUNK:
            words = " ".join(self._random.choices(_WORDS, k=self._random.randint(*self._prompts(begin))))
            requests.append(LoadRequest(words, self._random.randint(*self._outputs(begin)), at))
            at += self._random.expovariate(self._rate(begin))
        return requests
