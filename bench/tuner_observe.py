"""What does it cost to observe a fleet? The tuner's own scraper and merge, over HTTP, on pods that serve what they would.

    python -m bench.tuner_observe               # 2,000 pods, 100 services, three rounds
    python -m bench.tuner_observe --pods 200    # fewer

All pods are one small server in a process of its own, on the same machine; each answers with what a virtual pod under
traffic tells after another interval. Exit code 1 if a round takes longer than the interval, or a pod wasn't understood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import web
from bench.machine import machine

from paceline_core.knobs import Knobs
from paceline_core.step_time import StepModel
from paceline_core.wire import to_json
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.scrape import Scraper, Source
from paceline_operator.tuning.view import merge
from paceline_sim.generate import Lengths, poisson
from paceline_sim.live import VirtualPod

RESULTS = Path(__file__).parent / "results"
INTERVAL = 30.0
CONCURRENCY, TIMEOUT = 32, 5.0  # the operator's defaults
RATE = 1.0  # requests/s and pod
KINDS = 16  # pods that differ; the others tell the same as one of these
SERVICES = 100


@dataclass(frozen=True, slots=True)
class Round:
    """One look at all pods: wall and CPU seconds of the operator's side, of which merging; pods understood, requests."""

    wall: float
    cpu: float
    merging: float
    fresh: int
    requests: int


def answers(kind: int, rounds: int) -> Mapping[str, bytes]:
    """Return what a pod answers, by the cursor from which it is asked on."""
    device = StepModel(0.012, 2e-4, 6e-5, 2.5e-7, 1e-9)
    pod = VirtualPod(Knobs(max_num_seqs=32), device, num_blocks=8000, max_model_len=1 << 20, name=f"kind-{kind}")
    lengths = Lengths({50: 300, 95: 1500, 100: 4000}), Lengths({50: 120, 95: 400, 100: 800})
    for request in poisson(RATE, INTERVAL * rounds, *lengths, seed=kind).requests:
        pod.send(request)
    found, cursor = {}, 0
    for number in range(1, rounds + 1):
        pod.run(number * INTERVAL)
        document = pod.observe(cursor)
        found[str(cursor)] = json.dumps(to_json(document)).encode()
        cursor = document.cursor
    return found


def serve(told: Sequence[Mapping[str, bytes]], port: Connection) -> None:
    """Be all pods: the token says which."""

    async def observe(request: web.Request) -> web.Response:
        kind = int(request.headers["Authorization"].removeprefix("Bearer ")) % len(told)
        return web.Response(body=told[kind][request.query["since"]], content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/admin/observe", observe)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def look(pods: int, rounds: int, port: int) -> list[Round]:
    """Observe all pods `rounds` times."""
    ledgers = [PodLedger(f"pod-{number}", most=200) for number in range(pods)]
    sources = [(Source(ledger.name, "127.0.0.1", str(number)), ledger) for number, ledger in enumerate(ledgers)]
    objective, found = Objective(1.0, 0.05), []
    scraper = Scraper(timeout=TIMEOUT, concurrency=CONCURRENCY, admin_port=port, http_port=port)
    try:
        for _ in range(rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            await scraper.look(sources)
            begun, now = time.process_time(), time.time()
            views = [merge(ledgers[n::SERVICES], objective, now, 4 * INTERVAL) for n in range(min(SERVICES, pods))]
            end = time.process_time()
            fresh, requests = sum(view.fresh for view in views), sum(view.requests for view in views)
            found.append(Round(time.perf_counter() - wall, end - cpu, end - begun, fresh, requests))
    finally:
        await scraper.close()
    return found


def report(pods: int, told: Sequence[Mapping[str, bytes]], rounds: Sequence[Round]) -> str:
    """Return the result as Markdown."""
    sizes = [len(text) for answer in told for text in answer.values()]
    lines = [
        "# Observing a fleet", "",
        f"{pods} pods of {min(SERVICES, pods)} services at {RATE:g} request/s each, interval {INTERVAL:g} s;",
        f"{CONCURRENCY} calls at once, answers of {sum(sizes) / len(sizes) / 1024:.0f} KiB on average.",
        "The pods' server is another process on this machine.", "",
        f"Machine: {machine()}.", "",
        "| round | seconds | of the interval | operator's CPU s | merging | CPU ms per pod | pods understood | requests |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {number} | {r.wall:.1f} | {r.wall / INTERVAL:.0%} | {r.cpu:.1f} | {r.merging:.1f} | {1000 * r.cpu / pods:.1f} | "
        f"{r.fresh} | {r.requests} |"
        for number, r in enumerate(rounds, 1)
    ]
    return "\n".join([*lines, "", "Again: `python -m bench.tuner_observe`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner_observe", description="Observe many pods over HTTP.")
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    told = [answers(kind, options.rounds) for kind in range(KINDS)]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(told, there), daemon=True)
    server.start()
    try:
        rounds = asyncio.run(look(options.pods, options.rounds, here.recv()))
    finally:
        server.terminate()
        server.join()
    text = report(options.pods, told, rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tuner_observe.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(r.wall < INTERVAL and r.fresh == options.pods for r in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
