"""`paceline simulate`: replay requests through the production scheduler and show what happens."""

from __future__ import annotations

import json

import click
from rich.console import Console

from paceline_cli.timeline import Marks, draw
from paceline_core.knobs import Strategy, knob
from paceline_sim import Result, teach

__all__ = ["simulate"]

_MAX_LENGTH = 100_000  # steps; a longer one is a typing error, and would take minutes
_MAX_REQUESTS = 10_000
_SLOTS = knob("maxNumSeqs")
_WAIT = knob("maxQueueDelay")

EPILOG = """\b
Examples:
  # head-of-line blocking: three slots wait for the longest request of their batch
  paceline simulate --lengths 8,2,2,2,6,4,4,4 --strategy static
  # the same requests, each slot refilled as soon as it is free
  paceline simulate --lengths 8,2,2,2,6,4,4,4 --strategy continuous
  # a stream: one request every 10 steps, batches start after at most 15 steps
  paceline simulate --lengths 120,30,60,300,40,90 --arrive-every 10 \\
      --strategy dynamic --max-wait 15

\b
Time is counted in steps: each step gives every running request one token,
and prompts cost nothing. A request's latency counts from its arrival until
its result is given back; static and dynamic give a whole batch back at once.
"""


def _parse_lengths(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Turn `120,30,60` into numbers; say which one is wrong."""
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
@click.option(
    "--lengths", required=True, callback=_parse_lengths, metavar="N,N,…", help="Output length of each request, in steps."
)
@click.option(
    "--arrive-every", type=click.IntRange(0, 1_000_000), default=0, show_default="all at once", metavar="STEPS",
    help="Steps between two arrivals.",
)  # fmt: skip
@click.option(
    "--slots",
    type=click.IntRange(1, int(_SLOTS.high or 1)),
    default=4,
    show_default=True,
    metavar="N",
    help="Sequences that fit one batch (maxNumSeqs).",
)
@click.option(
    "--strategy",
    type=click.Choice([s.value for s in Strategy]),
    default=Strategy.CONTINUOUS.value,
    show_default=True,
    help="How requests are grouped into batches.",
)
@click.option(
    "--max-wait", type=click.FloatRange(0, _WAIT.high), default=15, show_default=True, metavar="STEPS",
    help="Strategy dynamic: the longest that the oldest request waits for a full batch (maxQueueDelay).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of the timeline.")
def simulate(lengths: tuple[int, ...], arrive_every: int, slots: int, strategy: str, max_wait: float, as_json: bool) -> None:
    """Replay requests through the scheduler that serves in production, and show who had which slot when.

    Rows are slots, letters are requests, and what is idle or held shows what a strategy wastes.
    """
    result = teach(lengths, every=arrive_every, slots=slots, strategy=Strategy(strategy), max_wait=max_wait)
    if as_json:
        click.echo(json.dumps(_figures(result)))
    else:
        _show(result, strategy)


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
        console.print(line, no_wrap=True, overflow="crop")
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
