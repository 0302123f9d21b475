"""`paceline simulate`: replay requests through the production scheduler and show what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from paceline_cli.numbers import FiniteRange
from paceline_cli.simulate_inputs import (
    measured_engine,
    parse_changes,
    parse_settings,
    read_knobs,
    read_traffic,
    roofline_engine,
)
from paceline_cli.simulate_options import FILE, engine_options, slo_option, traffic_options
from paceline_cli.simulate_trace import Question, answer, parse_loads
from paceline_cli.timeline import Marks, draw
from paceline_core.knobs import Strategy, knob
from paceline_sim import Engine, Result, Slo, teach

__all__ = ["simulate"]

_MAX_LENGTH = 100_000  # steps; a longer one is a typing error, and would take minutes
_MAX_REQUESTS = 10_000
_SLOTS = knob("maxNumSeqs")
_WAIT = knob("maxQueueDelay")
_TAUGHT = {"lengths", "arrive_every", "slots", "max_wait", "strategy", "as_json"}  # options that go with --lengths

EPILOG = """\b
Examples:
  # head-of-line blocking: three slots wait for the longest request of their batch
  paceline simulate --lengths 8,2,2,2,6,4,4,4 --strategy static
  # the same requests, each slot refilled as soon as it is free
  paceline simulate --lengths 8,2,2,2,6,4,4,4 --strategy continuous
  # a stream: one request every 10 steps, batches start after at most 15 steps
  paceline simulate --lengths 120,30,60,300,40,90 --arrive-every 10 \\
      --strategy dynamic --max-wait 15
  # your traffic: would another strategy serve more of it in time?
  paceline simulate --trace requests.csv --slo ttft=500ms,tpot=50ms \\
      --compare strategy=static,dynamic,continuous,iteration
  # made-up traffic: how many slots, and what if there were twice as much?
  paceline simulate --generate rate=20,duration=2m --slo ttft=1s,tpot=30ms \\
      --sweep maxNumSeqs=8:512 --load 1,2
  # where does goodput stop growing? a picture of latency against load
  paceline simulate --trace requests.csv --for 10m --slo ttft=500ms,tpot=50ms \\
      --compare strategy=dynamic,continuous --plot load.png

\b
With --lengths time is counted in steps: each step gives every running request
one token, and prompts cost nothing. A request's latency counts from its arrival
until its result is given back; static and dynamic give a batch back at once.
With --trace or --generate time is in seconds: steps take what the roofline of
--model on --accelerator says, or what --step-model measured.
"""


def _parse_lengths(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Turn `120,30,60` into numbers; say which one is wrong."""
    if value is None:
        return None
    lengths = []
    for position, item in enumerate(value.split(","), start=1):
        text = item.strip()
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= _MAX_LENGTH or len(text) > 9:
            raise click.BadParameter(
                f"item {position} is {text!r}, expected a whole number of steps from 1 to {_MAX_LENGTH}, as in 120,30,60"
            )
        lengths.append(int(text))
    if len(lengths) > _MAX_REQUESTS:
        raise click.BadParameter(f"{len(lengths)} requests are too many, the most is {_MAX_REQUESTS}")
    return tuple(lengths)


@click.command(epilog=EPILOG)
@click.option("--lengths", callback=_parse_lengths, metavar="N,N,…", help="Output length of each request, in steps.")
@click.option(
    "--arrive-every",
    type=click.IntRange(0, 1_000_000),
    metavar="STEPS",
    help="With --lengths: steps between two arrivals.  [default: all at once]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, int(_SLOTS.high or 1)),
    metavar="N",
    help="With --lengths: sequences that fit one batch (maxNumSeqs).  [default: 4]",
)
@click.option(
    "--max-wait",
    type=FiniteRange(0, _WAIT.high),
    metavar="STEPS",
    help="With --lengths and strategy dynamic: the longest wait for a full batch (maxQueueDelay).  [default: 15]",
)
@click.option(
    "--strategy",
    type=click.Choice([s.value for s in Strategy]),
    help="How requests are grouped into batches.  [default: continuous]",
)
@traffic_options
@slo_option
@click.option("--compare", multiple=True, metavar="KNOB=A,B,…", help="Values to compare, as in strategy=static,continuous.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="KNOB=LOW:HIGH",
    help="Doubling values (or a list), as in maxNumSeqs=8:512. Repeatable.",
)
@click.option("--load", metavar="X,X,…", help="Multiples of the trace's rate to replay.  [default: 1; with --plot a ladder]")
@click.option("--accelerator", default="h200", show_default=True, metavar="NAME", help="A built-in accelerator.")
@engine_options
@click.option("--step-model", type=FILE, metavar="FILE", help="Measured step times (JSON) instead of --model's roofline.")
@click.option("--kv-blocks", type=click.IntRange(1), metavar="N", help="With --step-model: blocks of the KV pool.")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes that replay side by side.  [default: cores]")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw latency and goodput over load (.png or .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of a picture or table.")
def simulate(**options: Any) -> None:
    """Replay requests through the scheduler that serves in production: what would happen if…

    With --lengths it draws who had which slot when: rows are slots, letters are requests. With --trace or --generate it
    compares settings by throughput, latency and goodput (requests per second that meet the SLO).
    """
    traffic = [name for name in ("trace", "generate") if options[name] is not None]
    if (options["lengths"] is not None) + len(traffic) != 1:
        raise click.UsageError("give one of --lengths (a teaching example), --trace (recorded) and --generate (made up)")
    if options["lengths"] is not None:
        _teach(options)
    else:
        _replay(options)


def _teach(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name is not None and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in _TAUGHT:
            raise click.UsageError(f"{option.opts[0]} needs --trace or --generate")
    strategy = options["strategy"] or Strategy.CONTINUOUS.value
    result = teach(
        options["lengths"],
        every=options["arrive_every"] or 0,
        slots=options["slots"] or 4,
        strategy=Strategy(strategy),
        max_wait=15 if options["max_wait"] is None else options["max_wait"],
    )
    if options["as_json"]:
        click.echo(json.dumps(_figures(result)))
    else:
        _show(result, strategy)


def _replay(options: dict[str, Any]) -> None:
    for name, instead in (
        ("arrive_every", "--load"),
        ("slots", "--set maxNumSeqs=N"),
        ("max_wait", "--set maxQueueDelay=T"),
    ):
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to --lengths: with a trace give {instead}")
    slo: Slo = options["slo"]
    changes = parse_changes("--compare", options["compare"]) | parse_changes("--sweep", options["sweep"])
    strategy = {} if options["strategy"] is None else {"strategy": options["strategy"]}
    base = read_knobs(options["config"], strategy | parse_settings(options["settings"]), slo)
    loads = parse_loads(options["load"], plot=options["plot"] is not None)
    engine, name = _engine(options)
    trace = read_traffic(options["trace"], options["generate"], options["start"], options["length"])
    question = Question(trace, engine, name, base, changes, loads, slo, options["workers"])
    answer(question, as_json=options["as_json"], plot=options["plot"])


def _engine(options: dict[str, Any]) -> tuple[Engine, str]:
    path: Path | None = options["step_model"]
    if path is not None:
        engine = measured_engine(path, options["kv_blocks"], options["max_model_len"], options["pipeline_depth"])
        return engine, f"step times of {path.name}, {options['kv_blocks']:,} KV blocks"
    model, accelerator, dtype, share = (options[name] for name in ("model", "accelerator", "dtype", "efficiency"))
    engine = roofline_engine(model, accelerator, dtype, share, options["max_model_len"], options["pipeline_depth"])
    return engine, f"{model} ({dtype}) on one {accelerator}: roofline at {share:.0%} of the data sheet's figures"


def _figures(result: Result) -> dict[str, object]:
    """Return the figures of `--json`; whole numbers of steps are printed as such."""
    return {
        "steps": _whole(result.duration),
        "slot_utilisation": result.slot_utilisation,
        "mean_latency": result.mean_latency,
        "latencies": [_whole(latency) for latency in result.latencies],
    }


def _whole(steps: float) -> float:
    return int(steps) if steps == int(steps) else steps


def _show(result: Result, strategy: str) -> None:
    console = Console(highlight=False)
    for line in draw(result, width=console.width, marks=Marks.for_encoding(console.encoding)):
        console.print(line)  # rows fit the width; what explains them wraps where it is narrow
    console.print()
    console.print(_summary(result, strategy), style="bold", soft_wrap=True)


def _summary(result: Result, strategy: str) -> str:
    """Say in one line how well the slots were used and what became of the rest."""
    total = result.slots * result.duration
    held = sum(o.released - o.last_token for o in result.outcomes if o.last_token is not None)
    idle = total - result.busy - held
    lost = f"{held / total:.0%} held by requests that had ended, " if held else ""
    return (
        f"{strategy}: {result.duration:.10g} steps, mean latency {result.mean_latency:.0f} steps, "
        f"slots {result.slot_utilisation:.0%} used ({lost}{idle / total:.0%} idle)"
    )
