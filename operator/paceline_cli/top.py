"""`paceline top`: a live view of a fleet in the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from paceline_cli.numbers import FiniteRange
from paceline_cli.top_fleet import Fleet, KubeCluster, ServiceRow
from paceline_core.errors import PacelineError
from paceline_local.leftovers import is_up
from paceline_local.state import StateDir, state_dir

__all__ = ["top"]

_PIPE_WIDTH = 240
_BETWEEN_S = 1.0  # of the two looks that --once takes its rates from

EPILOG = """\b
Examples:
  paceline top                    # of `paceline local` if that runs here, else of kubectl's cluster
  paceline top -n chat            # one namespace
  paceline top --once --json      # for scripts

\b
Keys: s sorts by the next column, r reverses, / filters, q ends it. TTFT and TPOT are at the percentile of the service's
objective over the last interval, red where they miss it.
"""


@click.command(epilog=EPILOG)
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="[default: $KUBECONFIG, a running `paceline local`, ~/.kube/config]")  # fmt: skip
@click.option("-n", "--namespace", help="Only this namespace.  [default: all]")
@click.option(
    "--every", type=FiniteRange(0.2, 3600), default=2.0, show_default=True, metavar="SECONDS", help="Between looks."
)
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON.")
def top(kubeconfig: Path | None, namespace: str | None, every: int, once: bool, as_json: bool) -> None:
    """Show a fleet live: services with strategy, load, KV use, tokens/s, latency against objectives, and the tuner."""
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    if not once and not sys.stdout.isatty():
        raise click.UsageError("the live view needs a terminal: use --once")
    fleet = Fleet(KubeCluster(kubeconfig or _found(state_dir(None)), namespace))
    if once:
        rows = _twice(fleet)
        click.echo(json.dumps([asdict(row) for row in rows])) if as_json else _print(rows)
        return
    from paceline_cli.top_view import TopApp

    fleet.look()  # what can't be asked is said before the screen is taken
    TopApp(fleet, every).run()


def _found(local: StateDir) -> Path | None:
    """Return the kubeconfig of the local stack if it runs and nothing else was named."""
    return local.kubeconfig if not os.environ.get("KUBECONFIG") and is_up(local) else None


def _twice(fleet: Fleet) -> list[ServiceRow]:
    """Look twice: rates and latencies are of the time between."""
    if fleet.look():
        time.sleep(_BETWEEN_S)
    return fleet.look()


def _print(rows: list[ServiceRow]) -> None:
    from paceline_cli.top_view import COLUMNS, cells

    if not rows:
        raise PacelineError("there is no InferenceService")
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
