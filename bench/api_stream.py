"""What the API process costs a stream: tokens/s through server-sent events on one core, and latency added to each token.

The clock device makes a token for each of some streams in every step. The API process has a core of its own; engine and
client share another. Added latency: from a step's end in the engine until the client has the character that it completed.
Once at the rate that the goal names, and once as fast as engine and client can on their core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop
from bench.api_stream_client import Stream, request_of, run_streams
from bench.machine import machine
from bench.soak_server import SoakServer

RESULTS = Path(__file__).parent / "results"
RATE_GOAL, LATENCY_GOAL = 2000.0, 5e-3  # tokens/s; seconds, the 95th percentile
STEADY_STEP, FLOOD_STEP = 0.028, 0.002  # seconds of a step: 64 streams make 2,286 and 32,000 tokens/s
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOALS = (
    f"Goals: {RATE_GOAL:g} tokens/s and p95 below {1e3 * LATENCY_GOAL:g} ms at the longer step. At the shorter one "
    "engine and client fill their core: how little of its own the API process takes then shows what it could stream."
)
PROMPT = "Tell me of the sea, and of those who go down to it in ships."
RAMP = 1.0  # seconds after the last stream's first token: 64 requests that come at once keep everybody waiting at first
IDLE_MODEL = {"decodeTokens": 0.0, "prefillTokens": 0.0, "contextTokens": 0.0, "prefillAttention": 0.0}


@dataclass(frozen=True, slots=True)
class Result:
    """One load. Rates per second, times in seconds; `cpu` is the API process's share of its core, `per_token` a token's.

    `added` are percentiles (50, 95, 99) of the latency added to a token, once all streams have begun; None: not looked at.
    """

    endpoint: str
    streams: int
    step: float
    tokens: int
    seconds: float
    rate: float
    events: int
    cpu: float
    per_token: float
    added: tuple[float, float, float] | None


class Pinned:
    """A server with the clock device: its API process on the first core, its engine and this process on the last."""

    def __init__(self, folder: Path, step: float, streams: int) -> None:
        args = ("--device", "clock", "--max-num-seqs", str(streams), "--max-num-seqs-limit", str(streams))
        self._server = SoakServer(folder, args, {**IDLE_MODEL, "constant": step})
        cores = sorted(os.sched_getaffinity(0))
        pin(self._server.process.pid, cores[0])
        pin(self._server.engine_pid, cores[-1])
        pin(os.getpid(), cores[-1])
        self._process = psutil.Process(self._server.process.pid)
        self.port = int(urlsplit(self._server.url).port or 0)

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def records(self) -> tuple[dict[str, float], list[float]]:
        """Return the first token's time of each request, and the ends of all steps that decoded, in order (Unix seconds)."""
        firsts: dict[str, float] = {}
        ends: list[float] = []
        cursor = 0
        while True:
            page = self._server.admin.get("/admin/observe", params={"since": cursor}).json()
            firsts |= {r["requestId"]: r["firstToken"] for r in page["requests"] if r["firstToken"] is not None}
            ends += [step["end"] for step in page["steps"]]
            if page["cursor"] == cursor:
                return firsts, ends
            cursor = page["cursor"]

    def close(self) -> None:
        self._server.close()


def pin(pid: int, core: int) -> None:
    """Bind every thread of a process to a core: each has an affinity of its own."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def measure(endpoint: str, streams: int, step: float, seconds: float) -> Result:
    """Run `streams` streams for about `seconds` of steps."""
    with tempfile.TemporaryDirectory(prefix="api-stream-") as folder:
        server = Pinned(Path(folder), step, streams)
        try:
            uvloop.run(run_streams(server.port, _requests(endpoint, 4, 32, "warm"), 60))
            tokens = int(seconds / step)
            began, cpu = time.perf_counter(), server.cpu_seconds()
            done = uvloop.run(run_streams(server.port, _requests(endpoint, streams, tokens, "run"), 60 + 20 * seconds))
            took, cpu = time.perf_counter() - began, server.cpu_seconds() - cpu
            firsts, ends = server.records()
        finally:
            server.close()
    late: list[float] = []
    if step == STEADY_STEP:  # at the other the engine makes more steps than it keeps, and nobody asks for the delay
        begun = max(firsts[f"run-{i}"] for i in range(streams)) + RAMP
        late = [delay for i, stream in enumerate(done) for delay in added(stream, firsts[f"run-{i}"], ends, begun)]
    cuts = statistics.quantiles(late, n=100) if late else None
    total = tokens * streams
    events = sum(stream.chunks for stream in done)
    percentiles = None if cuts is None else (cuts[49], cuts[94], cuts[98])
    return Result(endpoint, streams, step, total, took, total / took, events, cpu / took, cpu / total, percentiles)


def _requests(endpoint: str, streams: int, tokens: int, name: str) -> list[bytes]:
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    asked: dict[str, Any] = chat if endpoint == "chat" else {"prompt": PROMPT}
    body = {**asked, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return [request_of(PATHS[endpoint], body, f"{name}-{i}") for i in range(streams)]


def added(stream: Stream, first_token: float, ends: Sequence[float], begun: float) -> list[float]:
    """Return for each character after `begun` the seconds from the end of the step that completed it until it was there."""
    at = bisect_left(ends, first_token)
    # the engine reads the clock a moment before it says that the step has ended: the step is the nearest
    start = min((i for i in (at - 1, at) if 0 <= i < len(ends)), key=lambda i: abs(ends[i] - first_token))
    made = [(shown.at, ends[start + shown.token]) for shown in stream.shown()]
    return [at - end for at, end in made if end > begun]


def middle(rounds: Sequence[Result]) -> Result:
    """Return the round whose cost of a token is the median (of an even number the dearer)."""
    return sorted(rounds, key=lambda result: result.per_token)[len(rounds) // 2]


def page(results: Sequence[Result], rounds: int) -> str:
    """Return the table."""
    rows = [
        f"| {r.endpoint} | {r.streams} | {1e3 * r.step:g} | {r.rate:.0f} | {r.events / r.seconds:.0f} | {r.cpu:.0%} "
        f"| {1e6 * r.per_token:.0f} | {' / '.join(f'{1e3 * value:.1f}' for value in r.added or ()) or '–'} |"
        for r in results
    ]
    return "\n".join([
        "# What the API process costs a stream", "", f"Machine: {machine()}.",
        "The clock device's tokens as server-sent events; the API process on one core, engine and client on the other.",
        f"Rounds: {rounds}, and of these the one with the median cost of a token.", "",
        "| endpoint | streams | step ms | tokens/s | events/s | of its core | µs per token | added p50 / p95 / p99 ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|", *rows, "",
        GOALS, "",
        "Again: `python -m bench.api_stream`.", "",
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.api_stream", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps, for each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    loads = [(step, part, endpoint) for step, part in ((STEADY_STEP, 1.0), (FLOOD_STEP, 0.1)) for endpoint in PATHS]
    measured: list[list[Result]] = [[] for _ in loads]
    for round_ in range(options.rounds):  # each with servers of its own: pages lie better for one than for another
        for (step, part, endpoint), found in zip(loads, measured, strict=True):
            print(f"round {round_ + 1} of {options.rounds}: {endpoint}, steps of {1e3 * step:g} ms", file=sys.stderr)
            found.append(measure(endpoint, options.streams, step, part * options.seconds))
    results = [middle(found) for found in measured]
    options.out.mkdir(parents=True, exist_ok=True)
    text = page(results, options.rounds)
    (options.out / "api_stream.md").write_text(text, encoding="utf-8")
    document = {"machine": machine(), "results": [asdict(result) for result in results]}
    (options.out / "api_stream.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    steady = [result for result in results if result.step == STEADY_STEP]
    return 0 if all(reached(result) for result in steady) else 1


def reached(result: Result) -> bool:
    """Return whether a result is what the goals ask."""
    return result.rate >= RATE_GOAL and result.added is not None and result.added[1] <= LATENCY_GOAL


if __name__ == "__main__":
    sys.exit(main())
