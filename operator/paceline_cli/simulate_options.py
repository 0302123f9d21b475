"""Options that `paceline simulate` and `paceline plan` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline_sim import Slo
from paceline_sim.hardware import DTYPES

__all__ = ["apply_options", "engine_options", "slo_option", "traffic_options"]

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)


def apply_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that applies `options`, the first listed first in the help."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _slo(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Slo:
    return Slo.parse(value) if value else Slo()


slo_option = click.option(
    "--slo", callback=_slo, metavar="ttft=T,tpot=T,…",
    help="Latency objectives: any of ttft, tpot, e2e (with units), and percentile (of requests that must meet them; 95).",
)  # fmt: skip

traffic_options = apply_options(
    click.option("--trace", type=FILE, metavar="FILE", help="Recorded traffic: CSV, JSONL, or answers of /admin/observe."),
    click.option(
        "--generate", metavar="KEY=VALUE,…",
        help="Made-up traffic instead: rate, duration, prompt and output (tokens, or P50/P95/MOST), burst and every, "
        "prefixes (how many) and prefix (tokens of each), seed.",
    ),
    click.option("--from", "start", default="0s", metavar="TIME", help="Begin at this time of the trace, as in 30m."),
    click.option(
        "--for", "length", default="never", metavar="TIME",
        help="Replay only so much of the trace, as in 10m.",
    ),
)  # fmt: skip

engine_options = apply_options(
    click.option("--model", default="llama-3.1-8b", show_default=True, metavar="NAME", help="A built-in model's shape."),
    click.option(
        "--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Type of the weights."
    ),
    click.option(
        "--efficiency", type=float, default=0.7, show_default=True, metavar="SHARE",
        help="Share of the data sheet's bandwidth and operations that an engine reaches; 1 is the ceiling.",
    ),
    click.option(
        "--max-model-len", type=click.IntRange(1), metavar="TOKENS", help="Longest request.  [default: the model's]"
    ),
    click.option(
        "--pipeline-depth", type=click.IntRange(1, 2), default=1, show_default=True, metavar="1|2",
        help="Steps planned ahead; the runtime's is 2 on GPUs, where a newcomer may join one step later.",
    ),
    click.option("--config", type=FILE, metavar="FILE", help="Knobs: a knobs file, or an InferenceService manifest."),
    click.option(
        "--set", "settings", multiple=True, metavar="KNOB=VALUE", help="One knob, as in maxNumSeqs=64. May be repeated."
    ),
)  # fmt: skip
