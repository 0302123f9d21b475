"""The table of `paceline simulate --trace`: one row per setting, the best one marked, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from paceline_sim import Candidate, Slo, Summary

__all__ = ["Run", "best_of", "duration", "show"]

_MEANINGS = {
    "intake": "being read",
    "boundary": "waiting for the running step to end",
    "batch": "waiting for the batch",
    "slot": "waiting for a slot",
    "kv": "waiting for KV memory",
    "budget": "waiting for the token budget",
    "objective": "waiting to protect TPOT",
    "prefill": "own prefill",
    "delayed": "delayed by others' prefill",
    "preempted": "preempted and recomputed",
    "gap": "between two steps",
    "decode": "decoding",
    "held": "held by the batch",
}


_TIME_COLUMNS = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "E2E p95")
_WIDE = 126  # columns from which on the table shows everything


@dataclass(frozen=True, slots=True)
class Run:
    """One setting and what became of the trace under it; `offered` requests per second came."""

    candidate: Candidate
    summary: Summary
    offered: float


def best_of(runs: Sequence[Run]) -> Run:
    """Return the run with the most goodput of those that meet the SLO; among equals the one with the least tail latency."""
    return max(runs, key=lambda run: (run.summary.meets_slo, round(run.summary.goodput, 3), -run.summary.e2e.p95))


def duration(seconds: float) -> str:
    """Return seconds as people read them: three digits and a unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0"
    if seconds < 1:
        return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms"
    return f"{seconds:,.{0 if seconds >= 100 else 1 if seconds >= 10 else 2}f} s"


def show(console: Console, heading: Sequence[str], runs: Sequence[Run], slo: Slo) -> None:
    """Print heading, table and what to make of it."""
    for line in heading:
        console.print(line, soft_wrap=True)
    console.print(f"SLO: {slo}")
    console.print()
    best = best_of(runs) if len(runs) > 1 and slo.is_set else None
    console.print(_table(runs, slo, best, wide=console.width >= _WIDE) if len(runs) > 1 else _list(runs[0], slo))
    console.print()
    shown = best or runs[0]
    of = f" of {_name(shown)}" if len(runs) > 1 else ""
    console.print(f"Where the mean latency{of} goes: {causes(shown.summary.causes)}", soft_wrap=True)
    if best is not None:
        verdict = "meets the SLO" if best.summary.meets_slo else "no setting meets the SLO; this one comes closest"
        console.print(f"Best goodput: {_name(best)} ({verdict})", style="bold", soft_wrap=True)


def causes(parts: Mapping[str, float]) -> str:
    """Return what takes at least a hundredth of the time, the most first."""
    total = sum(parts.values()) or 1.0
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{seconds / total:.0%} {_MEANINGS[name]}" for name, seconds in largest if seconds >= 0.01 * total)


def _name(run: Run) -> str:
    load = f"load ×{run.candidate.load:g}" if run.candidate.load != 1 else ""
    return " ".join(filter(None, (run.candidate.label, load))) or "this setting"


def _table(runs: Sequence[Run], slo: Slo, best: Run | None, *, wide: bool) -> Table:
    """Return a row per run; a narrow terminal gets the columns that decide."""
    rows = [_cells(run, slo, wide=wide) for run in runs]
    several_loads = {run.candidate.load for run in runs} != {1.0}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    settings = [_settings(run) for run in runs]
    folded = not wide and len(settings[0]) > 1  # several knobs side by side: their names and the figures' go over lines
    if folded and several_loads:
        rows = [{name: text for name, text in row.items() if name != "tok/s"} for row in rows]
    for name in settings[0]:
        table.add_column(re.sub(r"(?<=[a-z])(?=[A-Z])", "\n", name) if folded else name, no_wrap=True)
    for column in (["load"] if several_loads else []) + list(rows[0]):
        table.add_column(column.replace(" ", "\n") if folded else column, justify="right", no_wrap=True)
    for run, setting, cells in zip(runs, settings, rows, strict=True):
        load = [f"×{run.candidate.load:g}"] if several_loads else []
        table.add_row(*setting.values(), *load, *cells.values(), style="bold green" if run is best else "")
    return table


def _settings(run: Run) -> dict[str, str]:
    """Return the values that tell this setting from the others, by knob; strategies stand for themselves in a label."""
    parts = (part.partition("=") for part in run.candidate.label.split())
    return {name if equals else "strategy": value if equals else name for name, equals, value in parts}


def _cells(run: Run, slo: Slo, *, wide: bool) -> dict[str, str]:
    """Return the figures of a row by the name of their column."""
    summary = run.summary
    good = {"in SLO": f"{summary.attainment:.1%}", "goodput/s": f"{summary.goodput:.2f}"} if slo.is_set else {}
    tails = {"TTFT p95": summary.ttft.p95, "TPOT p95": summary.tpot.p95, "E2E p95": summary.e2e.p95}
    times = {"TTFT p50": summary.ttft.p50, "TPOT p50": summary.tpot.p50, **tails} if wide else tails
    more = {"slots": summary.slots_used, "KV peak": summary.kv_peak} if wide else {}
    return {
        **({"req/s": f"{summary.request_rate:.2f}"} if wide or not good else {}),
        "tok/s": f"{summary.token_rate:,.0f}",
        **good,
        **{name: duration(times[name]) for name in sorted(times, key=_TIME_COLUMNS.index)},
        **{name: f"{share:.0%}" for name, share in more.items()},
        **({"preempt.": f"{summary.preemptions:,}"} if wide else {}),
    }


def _list(run: Run, slo: Slo) -> Table:
    """Return the figures of a single run, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    summary = run.summary
    table.add_row("throughput", f"{summary.request_rate:.2f} requests/s, {summary.token_rate:,.0f} output tokens/s")
    if slo.is_set:
        met = "met" if summary.meets_slo else "not met"
        table.add_row("goodput", f"{summary.goodput:.2f} requests/s ({summary.attainment:.1%} within the SLO: {met})")
    table.add_row("", "".join(f"{part:<11}" for part in ("mean", "p50", "p90", "p95", "p99")))
    spreads = {"TTFT": summary.ttft, "TPOT": summary.tpot, "E2E": summary.e2e, "in the queue": summary.queued}
    for name, spread in spreads.items():
        table.add_row(name, "".join(f"{duration(seconds):<11}" for seconds in astuple(spread)))
    table.add_row(
        "steps", f"{summary.steps:,}, {summary.busy:.0%} of the time, {summary.mean_batch:.1f} sequences on average"
    )
    table.add_row("slots used", f"{summary.slots_used:.1%}")
    cached = f", {summary.cached:.0%} of the prompt tokens cached" if summary.cached else ""
    table.add_row("KV memory", f"{summary.kv_mean:.1%} on average, {summary.kv_peak:.1%} at most{cached}")
    table.add_row("preemptions", f"{summary.preemptions:,}")
    if summary.refused:
        table.add_row("refused", f"{summary.refused:,}")
    return table
