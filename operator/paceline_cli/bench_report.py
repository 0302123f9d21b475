"""The HTML report of `paceline bench`: figures, plots and the command that made them, in one file."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from paceline_cli.bench_figures import BenchFigures, meets
from paceline_cli.load import Outcome
from paceline_sim import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "write_report"]

_BLUE, _ORANGE, _GREY, _RED = "#0072B2", "#D55E00", "#8a8a8a", "#b3261e"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1d1f23; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }}
th, td {{ text-align: right; padding: .2rem .9rem; border-bottom: 1px solid #ddd; }} th:first-child {{ text-align: left; }}
pre {{ background: #f4f3f0; padding: .8rem; overflow-x: auto; }} svg {{ max-width: 100%; height: auto; }}
.bad {{ color: #a3161a; }}
</style></head><body>
<h1>{title}</h1><p>{facts}</p>{errors}
<table><thead><tr><th>seconds</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th></tr></thead><tbody>{rows}</tbody></table>
{plot}
<h2>How it was made</h2><pre>{command}</pre></body></html>
"""


def write_report(
    path: Path, outcomes: Sequence[Outcome], figures: BenchFigures, slo: Slo, *, title: str, command: str
) -> None:
    """Write the report to `path`. Raises `OSError` if that can't be done."""
    plot = io.StringIO()
    _figure(outcomes, slo).savefig(plot, format="svg")
    svg = plot.getvalue()
    facts = (
        f"{figures.requests} requests in {figures.duration:.1f} s: {figures.output_rate:,.1f} output tokens/s, "
        f"{figures.total_rate:,.1f} tokens/s in all, {figures.request_rate:.2f} requests/s, "
        f"{figures.goodput:.2f} of them within the SLO ({slo}), at most {figures.most_in_flight} at once."
    )
    errors = "".join(f'<p class="bad">{count} × {html.escape(text)}</p>' for text, count in figures.errors.items())
    spreads = (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("between tokens", figures.itl), ("end to end", figures.e2e))
    rows = "".join(f"<tr><th>{name}</th>{_cells((s.mean, s.p50, s.p90, s.p95, s.p99))}</tr>" for name, s in spreads)
    page = _PAGE.format(
        title=html.escape(title),
        facts=html.escape(facts),
        errors=errors,
        rows=rows,
        plot=svg[svg.index("<svg") :],
        command=html.escape(command),
    )
    path.write_text(page, encoding="utf-8")


def draw(path: Path, outcomes: Sequence[Outcome], slo: Slo) -> None:
    """Write the plots alone to `path` (PNG or SVG by its suffix)."""
    _figure(outcomes, slo).savefig(path, dpi=150)


def _cells(values: Iterable[float]) -> str:
    return "".join(f"<td>{value:.3f}</td>" for value in values)


def _figure(outcomes: Sequence[Outcome], slo: Slo) -> Figure:
    with mpl.rc_context(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "paceline",
        }
    ):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        axes = figure.subplots(2, 2)
        _over_time(axes[0][0], outcomes, slo, "TTFT", lambda o: o.ttft, slo.ttft)
        _over_time(axes[0][1], outcomes, slo, "TPOT", lambda o: o.tpot, slo.tpot)
        _shares(axes[1][0], outcomes)
        _in_flight(axes[1][1], outcomes)
    return figure


def _over_time(
    axes: Axes,
    outcomes: Sequence[Outcome],
    slo: Slo,
    name: str,
    value: Callable[[Outcome], float | None],
    bound: float | None,
) -> None:
    for colour, label, wanted in ((_BLUE, "within the SLO", True), (_ORANGE, "outside", False)):
        points = [(o.sent, v) for o in outcomes if not o.error and meets(o, slo) is wanted and (v := value(o)) is not None]
        if points:
            times, values = zip(*points, strict=True)
            axes.scatter(times, values, s=12, color=colour, label=label)
    failed = [o.sent for o in outcomes if o.error]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=_RED, label="failed")
    if bound is not None:
        axes.axhline(bound, color=_GREY, linestyle="--", linewidth=1, label="objective")
    axes.set(xlabel="sent at (s)", ylabel=f"{name} (s)")
    axes.set_title(f"{name} by request", loc="left", fontweight="bold")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _shares(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    good = [o for o in outcomes if not o.error]
    for name, colour, values in (
        ("TTFT", _BLUE, [o.ttft for o in good]),
        ("between tokens", "#009E73", [gap for o in good for gap in o.gaps]),
        ("end to end", _ORANGE, [o.latency for o in good]),
    ):
        ordered = sorted(v for v in values if v is not None and v > 0)
        if ordered:
            axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", color=colour, label=name)
    axes.set(xlabel="seconds", ylabel="share that took at most so long", xscale="log", ylim=(0, 1))
    axes.set_title("How long things took", loc="left", fontweight="bold")
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _in_flight(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    times, levels, level = [0.0], [0], 0
    for time, change in changes:
        level += change
        times.append(time)
        levels.append(level)
    axes.step(times, levels, where="post", color=_BLUE)
    axes.set(xlabel="time (s)", ylabel="requests in flight")
    axes.set_title("Load", loc="left", fontweight="bold")
    axes.set_ylim(bottom=0)
