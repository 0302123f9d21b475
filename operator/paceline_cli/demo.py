"""`paceline demo`: a manifest becomes batching pods that answer, then one load under each of the four strategies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline_cli.demo_tuning import CLOCK, REAL, TUNED, Act, tuning_act
from paceline_cli.demo_view import StrategyRun, readiness, results_table, sentence
from paceline_cli.fleet import Fleet, FleetError
from paceline_cli.load import run_load, summarise
from paceline_cli.workload import LoadRequest, mixed_lengths
from paceline_core.knobs import Strategy
from paceline_core.main import USER_ERROR

__all__ = ["demo"]

MANIFEST = "smollm2.yaml"
SERVICE = "smollm2"
QUESTION = "In one sentence: why do cyclists ride in a line?"
READY_TIMEOUT = 180.0  # seconds; two pods on two busy cores load the model in about ten
SWITCH_TIMEOUT = 30.0  # seconds; a knob edit takes about one


@click.command()
@click.option("--requests", default=48, show_default=True, type=click.IntRange(4), help="Requests per strategy.")
@click.option("--seed", default=0, show_default=True, help="Seed of the workload.")
@click.option("--tuning/--no-tuning", default=True, help="Also show the tuner, on two clock pods.")
@click.option("--tuner", "only_tuner", is_flag=True, help="Only the tuner, on two pods of the real engine; some 6 minutes.")
@click.option("--keep", is_flag=True, help="Leave everything running and say what to try next.")
def demo(requests: int, seed: int, tuning: bool, only_tuner: bool, keep: bool) -> int:
    """Show the main job on this machine: a manifest becomes two batching pods that serve a real model.

    Starts a local control plane, the operator and two CPU pods of SmolLM2-135M, asks one chat question, runs the same
    mixed-length load under each batching strategy (switched by editing the InferenceService: no pod restarts), prints a
    comparison, lets the tuner mend badly set knobs on two clock pods, and cleans up. Takes less than five minutes on two
    cores.

    \b
    Examples:
      paceline demo
      paceline demo --keep          # leave it running; try kubectl on it
      paceline demo --requests 96   # a longer load
      paceline demo --tuner         # the tuner on the real engine, unhurried
    """
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal must leave as little behind as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    home = Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    act = REAL if only_tuner else CLOCK
    stage = _Stage(console, home, act)
    try:
        stage.start()
        fleet = Fleet(home / "kubeconfig", TUNED if only_tuner else SERVICE)
        if not only_tuner:
            stage.apply()
            stage.wait_ready(fleet)
            stage.ask(fleet.url())
            stage.compare(fleet, mixed_lengths(requests, seed))
        if tuning or only_tuner:
            stage.tune()
    except (FleetError, ValueError, subprocess.CalledProcessError) as error:
        console.print(f"[red]the demo failed:[/] {error}")
        stage.diagnose(TUNED if only_tuner else SERVICE)
        return USER_ERROR
    finally:
        if not keep:
            stage.stop()
    if keep:
        stage.say_what_next(fleet)
    return 0


class _Stage:
    """Runs the acts of the demo on one local control plane and shows them on a console."""

    def __init__(self, console: Console, home: Path, act: Act) -> None:
        self._console, self._home, self._act = console, home, act

    def start(self) -> None:
        """Bring up the control plane, by the command that a user would type."""
        self._console.rule("a control plane and the operator, on loopback")
        self._paceline("local", "up")

    def apply(self) -> None:
        """Apply the manifest."""
        self._console.rule("a manifest")
        self._paceline("local", "apply", "-f", str(_manifest()))

    def stop(self) -> None:
        """Remove everything that was started."""
        try:
            self._console.rule("clean up")
            self._paceline("local", "down", check=False)
        except OSError:  # nobody reads any more: the terminal is gone
            self._run("local", "down", check=False, output=subprocess.DEVNULL)
        for own in self._home.glob("*.json"):  # the acts' manifests; the stack takes its own files away itself
            own.unlink()
        with contextlib.suppress(OSError):  # whatever couldn't be stopped still needs it
            self._home.rmdir()

    def diagnose(self, service: str) -> None:
        """Show why a service isn't what it should be."""
        self._paceline("local", "get", check=False)
        self._paceline("local", "logs", service, "--tail", "5", check=False)

    def wait_ready(self, fleet: Fleet) -> None:
        """Show conditions and pods until the service is Ready."""
        start = time.monotonic()
        with Live(console=self._console, refresh_per_second=4) as live:

            def ready() -> bool:
                conditions = fleet.conditions()
                live.update(readiness(conditions, fleet.pods(), time.monotonic() - start))
                return conditions.get("Ready", {}).get("status") == "True"

            _wait(ready, READY_TIMEOUT, f"{fleet.name} didn't become Ready")
        self._console.print()

    def ask(self, url: str) -> None:
        """Ask one chat question and stream the answer."""
        self._console.rule("a question")
        self._console.print(f"[bold]{QUESTION}[/]")
        body = {
            "model": SERVICE,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as response:
            if response.status_code != httpx.codes.OK:
                raise FleetError(f"the service answered HTTP {response.status_code}: {response.read().decode()[:200]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                    self._console.print(choices[0].get("delta", {}).get("content") or "", end="", style="cyan", markup=False)
        self._console.print()

    def compare(self, fleet: Fleet, requests: tuple[LoadRequest, ...]) -> None:
        """Run the load under each strategy and print the comparison."""
        self._console.rule("one load, four strategies")
        before = fleet.pods()
        runs = [self._run_strategy(fleet, strategy, requests) for strategy in Strategy]
        after = fleet.pods()
        if [(p.name, p.restarts) for p in before] != [(p.name, p.restarts) for p in after]:
            raise FleetError("pods were replaced or restarted while strategies were switched")
        tokens = sum(r.max_tokens for r in requests)
        title = f"{len(requests)} requests at once, {tokens} output tokens, {len(after)} pods, the same processes throughout"
        self._console.print(results_table(runs, title))
        self._console.print(sentence(runs))
        failed = sum(run.load.failed for run in runs)
        if failed:
            raise FleetError(f"{failed} requests failed")

    def tune(self) -> None:
        """Show the tuner at work."""
        tuning_act(self._console, self._home, self._paceline, self._act)

    def _run_strategy(self, fleet: Fleet, strategy: Strategy, requests: tuple[LoadRequest, ...]) -> StrategyRun:
        fleet.edit_batching(strategy=strategy.value)
        _wait(lambda: fleet.strategies() == {strategy.value}, SWITCH_TIMEOUT, f"the pods didn't switch to {strategy}")
        before = fleet.slots()
        columns = (TextColumn(f"{strategy:<11}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} answers"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            task = progress.add_task("", total=len(requests))
            outcomes = asyncio.run(
                run_load(fleet.url(), fleet.name, requests, progress=lambda _: progress.advance(task)),
            )
        return StrategyRun(strategy.value, summarise(outcomes), fleet.slots().utilisation_since(before))

    def say_what_next(self, fleet: Fleet) -> None:
        """Print what to try on what was left running."""
        self._console.rule("left running; try")
        kubectl = f"kubectl --kubeconfig {self._home}/kubeconfig"
        edit = json.dumps({"spec": {"batching": {"maxNumSeqs": 4}}})
        for line in (
            f"export PACELINE_HOME={self._home}",
            f"{kubectl} get infsvc,pods",
            f"{kubectl} patch infsvc {fleet.name} --type merge -p '{edit}'",
            f"curl {fleet.url()}/v1/models",
            "paceline local down   # when you are done",
        ):
            self._console.print(f"  {line}", markup=False, soft_wrap=True)

    def _paceline(self, *args: str, check: bool = True) -> None:
        self._console.print(f"[dim]$ paceline {' '.join(args)}[/]")
        self._run(*args, check=check)

    def _run(self, *args: str, check: bool, output: int | None = None) -> None:
        env = os.environ | {"PACELINE_HOME": str(self._home), "PACELINE_TUNING_INTERVAL": str(self._act.interval)}
        subprocess.run([sys.executable, "-m", "paceline_cli", *args], env=env, check=check, stdout=output, stderr=output)


def _wait(done: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until `done`; raise `FleetError` if it isn't within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise FleetError(f"{what} within {timeout:.0f} s")
        time.sleep(0.25)


def _manifest() -> Path:
    """Return the example manifest: beside this package in a wheel, at the top of the tree in a checkout."""
    here = Path(__file__).resolve()
    candidates = (here.parent / "examples" / MANIFEST, here.parents[2] / "examples" / MANIFEST)
    return next(path for path in candidates if path.exists())
