"""What the demo shows: the pods on their way to Ready, and the table of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline_cli.fleet import PodView
from paceline_cli.load import LoadSummary

__all__ = ["StrategyRun", "readiness", "results_table", "sentence"]

_MARK = {"True": ("✔", "green"), "False": ("✘", "yellow"), "Unknown": ("…", "dim")}


@dataclass(frozen=True, slots=True)
class StrategyRun:
    """One strategy under one load: its figures and the share of slots that did useful work."""

    strategy: str
    load: LoadSummary
    slot_utilisation: float


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    value: Callable[[StrategyRun], float]
    form: str
    higher_is_better: bool = False


_COLUMNS = (  # headers of two lines: the table fits 80 columns
    _Column("out\ntok/s", lambda run: run.load.output_tokens_per_s, "{:.1f}", higher_is_better=True),
    _Column("slots\nused", lambda run: run.slot_utilisation, "{:.0%}", higher_is_better=True),
    _Column("mean\nlatency", lambda run: run.load.mean_latency, "{:.1f} s"),
    _Column("p95\nlatency", lambda run: run.load.p95_latency, "{:.1f} s"),
    _Column("TTFT\np50", lambda run: run.load.ttft_p50, "{:.2f} s"),
    _Column("TTFT\np95", lambda run: run.load.ttft_p95, "{:.2f} s"),
)


def readiness(conditions: Mapping[str, Mapping[str, Any]], pods: Sequence[PodView], elapsed: float) -> Group:
    """Return the live view of a service that is starting: its conditions and its pods."""
    lines = [Text(f"waiting for the service to be Ready, {elapsed:.0f} s", style="bold")]
    for kind in ("SpecValid", "Scheduled", "ModelReady", "Ready"):
        condition = conditions.get(kind, {"status": "Unknown", "message": ""})
        mark, style = _MARK.get(condition["status"], _MARK["Unknown"])
        lines.append(Text(f"  {mark} {kind:<11}", style=style) + Text(condition.get("message", ""), style="dim"))
    for pod in pods:
        state = "Ready" if pod.ready else pod.state
        lines.append(Text(f"    {pod.name}  {pod.ip or '-':<14} {state}", style="green" if pod.ready else "yellow"))
    return Group(*lines)


def results_table(runs: Sequence[StrategyRun], title: str) -> Table:
    """Return the comparison of strategies; the best figure of each column is bold."""
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    cells: list[list[Text]] = [[Text(run.strategy)] for run in runs]
    for column in _COLUMNS:
        table.add_column(column.header, justify="right", no_wrap=True)
        values = [column.value(run) for run in runs]
        best = max(values) if column.higher_is_better else min(values)
        for row, value in zip(cells, values, strict=True):
            row.append(Text(column.form.format(value), style="bold green" if value == best else ""))
    for row in cells:
        table.add_row(*row)
    return table


def sentence(runs: Sequence[StrategyRun]) -> str:
    """Return one sentence that says what the table shows, from its figures."""
    by_name = {run.strategy: run for run in runs}
    static, continuous = by_name["static"], by_name["continuous"]
    speed = continuous.load.output_tokens_per_s / static.load.output_tokens_per_s
    latency = continuous.load.mean_latency / static.load.mean_latency
    gave = (
        f"Re-forming the batch at every step gave {speed:.2f}× the tokens per second of static batching "
        f"at {latency:.2f}× its mean latency: "
    )
    if speed <= 1:
        return gave + "no gain here, it comes when requests wait for slots (try more --requests, on a quiet machine)."
    return gave + (
        f"{continuous.slot_utilisation:.0%} of the slots did useful work instead of {static.slot_utilisation:.0%}, "
        "because nobody waits for the longest request of a group."
    )
