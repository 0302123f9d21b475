"""`paceline plan`: what a model costs on an accelerator, and how many replicas a load needs, with the arithmetic shown."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from paceline_cli.plan_view import Verdict, show_ceilings, show_load, show_verdicts
from paceline_cli.simulate_inputs import parse_settings, read_knobs, read_traffic
from paceline_cli.simulate_options import apply_options, engine_options, slo_option, traffic_options
from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs
from paceline_sim import Engine, Roofline, Slo, Trace
from paceline_sim.capacity import share_of_one, size
from paceline_sim.hardware import DTYPES, find_accelerator, find_model

__all__ = ["plan"]

EPILOG = """\b
Examples:
  # the arithmetic alone: what limits one sequence, and what batching gains
  paceline plan --model llama-3.1-8b --accelerator h200
  # the memory wall: 32 sequences in nearly the step of one
  paceline plan --model llama-2-7b --accelerator h100 --context 100
  # does it fit?
  paceline plan --model llama-3.1-70b --accelerator h100
  # how many replicas of what does this traffic need?
  paceline plan --trace requests.csv --accelerator l40s,h100,h200 \\
      --slo ttft=500ms,tpot=50ms
  # made-up traffic, and engines that reach half of the data sheet's figures
  paceline plan --generate rate=40,duration=5m --slo ttft=1s,tpot=40ms \\
      --efficiency 0.5

\b
A step reads all weights and the KV of its sequences, and computes two operations
per weight and token; the slower of the two is what it takes. Replicas are found
by replaying the traffic, dealt out in turn, through the production scheduler.
"""


@click.command(epilog=EPILOG)
@apply_options(traffic_options, slo_option)
@click.option(
    "--accelerator",
    "accelerators",
    default="h200",
    show_default=True,
    metavar="NAME,…",
    help="Built-in accelerators to compare.",
)
@engine_options
@click.option(
    "--context",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    metavar="TOKENS",
    help="Per sequence, in the table of batches.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes that replay side by side.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(**options: Any) -> None:
    """Say how many replicas of what a load needs, from the roofline of a model on an accelerator.

    Without --trace or --generate it shows what one accelerator can do at most.
    """
    traffic = _traffic(options)  # what is wrong with it is said before anything is printed
    names = [name.strip() for name in options["accelerators"].split(",")]
    rooflines = [_roofline(options, name) for name in names]
    console = Console(highlight=False, quiet=options["as_json"])
    knobs = read_knobs(options["config"], parse_settings(options["settings"]), options["slo"])
    for roofline in rooflines:
        show_ceilings(console, roofline, knobs, options["context"])
    fitting = [roofline for roofline in rooflines if roofline.memory_left > 0]
    if not fitting:
        raise FormatError(rooflines[0].misfit)
    verdicts = _verdicts(options, fitting, knobs, console, traffic) if traffic is not None else []
    if options["as_json"]:
        click.echo(
            json.dumps({"verdicts": [verdict.document() for verdict in verdicts], "rooflines": [*map(_figures, rooflines)]})
        )


def _roofline(options: dict[str, Any], accelerator: str) -> Roofline:
    return Roofline(
        find_model(options["model"]), find_accelerator(accelerator), DTYPES[options["dtype"]], options["efficiency"]
    )  # fmt: skip


def _traffic(options: dict[str, Any]) -> Trace | None:
    """Return the traffic to plan for, None if none is given. Raises if there is too much of it or no objective."""
    given = [name for name in ("trace", "generate") if options[name] is not None]
    if len(given) > 1:
        raise click.UsageError("give either --trace or --generate")
    if given and not options["slo"].is_set:
        raise FormatError(
            "--slo is missing: without an objective any number of replicas will do, as in --slo ttft=500ms,tpot=50ms"
        )
    return read_traffic(options["trace"], options["generate"], options["start"], options["length"]) if given else None


def _verdicts(
    options: dict[str, Any], rooflines: list[Roofline], knobs: Knobs, console: Console, trace: Trace
) -> list[Verdict]:
    """Replay the load on fleets of each accelerator."""
    slo: Slo = options["slo"]
    verdicts = []
    for roofline in rooflines:
        verdicts.append(_verdict(options, roofline, trace, knobs))
        show_load(console, roofline, trace, verdicts[-1])
    show_verdicts(console, verdicts, slo)
    return verdicts


def _verdict(options: dict[str, Any], roofline: Roofline, trace: Trace, knobs: Knobs) -> Verdict:
    longest = options["max_model_len"] or roofline.model.max_len
    engine = Engine(roofline, roofline.num_blocks, longest, options["pipeline_depth"])
    status = Console(stderr=True)
    with status.status(f"{roofline.accelerator.name}: replaying") as shown:
        sizing = size(
            engine, trace, knobs, options["slo"], workers=options["workers"],
            progress=lambda text: shown.update(f"{roofline.accelerator.name}: replaying on {text}"),
        )  # fmt: skip
    batch = max(1, round(sizing.tried[0].mean_batch))
    return Verdict(roofline.accelerator.name, roofline.constant, sizing, share_of_one(trace, roofline, batch), batch)


def _figures(roofline: Roofline) -> dict[str, Any]:
    peak = Roofline(roofline.model, roofline.accelerator, roofline.weight_bytes, 1.0)
    return {
        "model": asdict(roofline.model),
        "accelerator": asdict(roofline.accelerator),
        "weight_bytes": roofline.model.weight_bytes(roofline.weight_bytes),
        "kv_bytes_per_token": roofline.model.kv_bytes_per_token(),
        "bytes_left_for_kv": roofline.memory_left,
        "single_stream_ceiling": 1 / peak.constant,
        "efficiency": roofline.efficiency,
    }
