"""`paceline simulate --trace`: many settings against one trace, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline_cli.simulate_view import Run, show
from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_sim import Candidate, Engine, Slo, Trace, candidates, evaluate

__all__ = ["Question", "answer", "parse_loads", "progress_bar"]

_LADDER = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # loads of a plot where none are asked for


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the twin: `trace` on `engine` under `base` with every combination of `changes`, at `loads`."""

    trace: Trace
    engine: Engine
    engine_name: str
    base: Knobs
    changes: Mapping[str, Sequence[Any]]
    loads: Sequence[float]
    slo: Slo
    workers: int | None


def answer(question: Question, *, as_json: bool, plot: Path | None) -> None:
    """Replay, and print a table or JSON; draw `plot` too if given."""
    if plot is not None and not question.trace.span:
        raise FormatError("--plot draws curves over load: it needs a trace whose requests don't all come at once")
    if plot is not None and not question.slo.is_set:
        raise FormatError("--plot marks where goodput stops growing: say what good is, as in --slo ttft=500ms,tpot=50ms")
    draw = _plotter(plot)  # a missing package or a wrong name shows before the work, not after it
    todo = candidates(question.base, question.changes, question.loads)
    with progress_bar("replaying", len(todo)) as advance:
        summaries = evaluate(
            question.engine, question.trace, todo, question.slo, workers=question.workers, progress=advance
        )  # fmt: skip
    rate = question.trace.rate
    runs = [Run(candidate, summary, rate * candidate.load) for candidate, summary in zip(todo, summaries, strict=True)]
    if draw is not None:
        draw(runs, question)
    if as_json:
        click.echo(json.dumps(_document(question, runs)))
        return
    show(Console(highlight=False), _heading(question), runs, question.slo)
    if plot is not None:
        click.echo(f"plot: {plot}")


def parse_loads(text: str | None, *, plot: bool) -> tuple[float, ...]:
    """Read the multiples of the trace's rate; without any, a plot gets a ladder of them and a table just the trace's own."""
    if text is None:
        return _LADDER if plot else (1.0,)
    try:
        loads = tuple(float(item) for item in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(0 < load <= 1000 for load in loads):
        raise FormatError(f"--load {text}: expected multiples of the trace's rate above 0, as in 0.5,1,2")
    return tuple(sorted(set(loads)))


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many replays are done, on a terminal only; yields what is called after each."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def _plotter(plot: Path | None) -> Callable[[Sequence[Run], Question], None] | None:
    if plot is None:
        return None
    if plot.suffix not in (".png", ".svg"):
        raise FormatError(f"--plot {plot}: expected a file name that ends with .png or .svg")
    if not plot.parent.is_dir():
        raise FormatError(f"--plot {plot}: there is no folder {plot.parent}")
    try:
        from paceline_cli.simulate_plot import draw
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("paceline"):
            raise
        raise FormatError("--plot needs matplotlib: pip install 'paceline[plot]'") from None
    return lambda runs, question: draw(runs, question.slo, _heading(question)[0], plot)


def _heading(question: Question) -> list[str]:
    trace = question.trace
    prompts = sum(request.prompt_len for request in trace.requests)
    outputs = sum(request.output_len for request in trace.requests)
    rate = f"{trace.rate:.2f} requests/s" if trace.span else "all at once"
    lines = [
        f"{len(trace.requests):,} requests in {trace.span:,.0f} s ({rate}), {prompts:,} prompt, {outputs:,} output tokens",
        question.engine_name,
    ]
    if trace.left_out:
        lines.append(f"note: {trace.left_out:,} records without output were left out")
    return lines


def _document(question: Question, runs: Sequence[Run]) -> dict[str, Any]:
    trace = question.trace
    return {
        "trace": {"requests": len(trace.requests), "seconds": trace.span, "left_out": trace.left_out},
        "engine": question.engine_name,
        "slo": asdict(question.slo),
        "runs": [
            {"label": run.candidate.label, "load": run.candidate.load, "knobs": _wire(run.candidate), **asdict(run.summary)}
            for run in runs
        ],
    }


def _wire(candidate: Candidate) -> dict[str, Any]:
    return knobs_to_wire(candidate.knobs)
