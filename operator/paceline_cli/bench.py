"""`paceline bench`: load a server that speaks OpenAI's API, and measure it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline_cli.bench_figures import BenchFigures, measure
from paceline_cli.bench_traffic import Server, prompts_of
from paceline_cli.load import Outcome, run_load
from paceline_cli.simulate_inputs import read_traffic
from paceline_cli.simulate_options import FILE, slo_option, traffic_options
from paceline_cli.simulate_view import duration
from paceline_cli.workload import LoadRequest, mixed_lengths
from paceline_core.errors import FormatError
from paceline_sim import Slo

__all__ = ["bench"]

EPILOG = """\b
Examples:
  # 64 requests, 16 at a time
  paceline bench --url http://localhost:8000 --requests 64 --closed 16
  # recorded traffic at a tenth of its rate, judged by an objective, with a report
  paceline bench --url http://localhost:8000 --trace requests.csv --for 5m \\
      --load 0.1 --slo ttft=500ms,tpot=50ms --report load.html
  # random arrivals, 4 a second for a minute
  paceline bench --url http://localhost:8000 \\
      --generate rate=4,duration=1m,prompt=200/800/2000,output=50/150/300
"""


@click.command(epilog=EPILOG)
@click.option("--url", required=True, metavar="URL", help="The server's root, as in http://localhost:8000.")
@click.option("--model", metavar="NAME", help="Model to ask for.  [default: the first that the server names]")
@click.option(
    "--api-key-env", metavar="NAME", default="OPENAI_API_KEY", show_default=True,
    help="Environment variable with the API key, if the server wants one.",
)  # fmt: skip
@click.option("--requests", type=click.IntRange(1, 1_000_000), metavar="N", help="A mixed-length load of N requests.")
@traffic_options
@click.option("--load", type=float, default=1.0, show_default=True, metavar="X", help="Multiple of the traffic's rate.")
@click.option(
    "--closed", type=click.IntRange(1, 10_000), metavar="CLIENTS",
    help="So many clients, each sending its next request when the last was answered, instead of the traffic's times.",
)  # fmt: skip
@slo_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of prompts and lengths.")
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, metavar="SECONDS", help="Without a byte.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--report", type=FILE, metavar="FILE", help="Write an HTML report with plots.")
@click.option("--plot", type=FILE, metavar="FILE", help="Write the plots (.png or .svg).")
def bench(**options: Any) -> int:
    """Load a server that speaks OpenAI's API and measure TTFT, TPOT, throughput and goodput from outside.

    The load is a number of mixed-length requests, recorded traffic or made-up traffic; it is the same for the same seed.
    Output lengths are forced with ignore_eos where the server knows it. Exit code 1 if a request failed.
    """
    requests, server = _prepare(options)
    outcomes = _run(server, requests, options)
    figures = measure(outcomes, options["slo"])
    if options["as_json"]:
        click.echo(json.dumps({"url": server.url, "model": server.model, **asdict(figures)}))
    else:
        _show(Console(highlight=False), server, figures, options["slo"])
    _write(options, outcomes, figures, server)
    return 1 if figures.failed else 0


def _prepare(options: dict[str, Any]) -> tuple[Sequence[LoadRequest], Server]:
    """Check what the load is before anything is sent."""
    sources = [name for name in ("requests", "trace", "generate") if options[name] is not None]
    if len(sources) != 1:
        raise click.UsageError("give one of --requests (mixed lengths), --trace (recorded) and --generate (made up)")
    if options["plot"] is not None and options["plot"].suffix not in (".png", ".svg"):
        raise FormatError(f"--plot {options['plot']}: expected a name that ends with .png or .svg")
    for name in ("report", "plot"):
        if options[name] is not None and not options[name].absolute().parent.is_dir():
            raise FormatError(f"--{name} {options[name]}: there is no such folder")
    trace = None
    if options["requests"] is None:
        trace = read_traffic(options["trace"], options["generate"], options["start"], options["length"]).scaled(
            options["load"]
        )
    elif options["load"] != 1.0:
        raise click.UsageError("--load needs --trace or --generate")
    server = Server.ask(
        options["url"].rstrip("/").removesuffix("/v1"), options["model"], os.environ.get(options["api_key_env"])
    )
    if trace is None:
        return mixed_lengths(options["requests"], options["seed"]), server
    return prompts_of(trace, server.tokens_per_word, options["seed"]), server


def _run(server: Server, requests: Sequence[LoadRequest], options: dict[str, Any]) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tokens = 0
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("requests", total=len(requests))

        def progress(new: int) -> None:
            nonlocal tokens
            tokens += new
            bar.update(task, advance=1, description=f"{tokens:,} tokens")

        return asyncio.run(
            run_load(
                server.url,
                server.model,
                requests,
                timeout=options["timeout"],
                progress=progress,
                concurrency=options["closed"],
                api_key=os.environ.get(options["api_key_env"]),
            )
        )


def _show(console: Console, server: Server, figures: BenchFigures, slo: Slo) -> None:
    console.print(
        f"{server.model} at {server.url}: {figures.requests} requests in {duration(figures.duration)}", style="bold"
    )
    facts = [
        f"{figures.output_rate:,.1f} output tokens/s ({figures.total_rate:,.1f} with prompts)",
        f"{figures.request_rate:.2f} requests/s",
        f"at most {figures.most_in_flight} at once",
    ]
    if slo.is_set:
        facts.append(f"goodput {figures.goodput:.2f} requests/s ({figures.attainment:.1%} within {slo})")
    console.print(", ".join(facts))
    table = Table(box=None, pad_edge=False)
    for column in ("", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("between tokens", figures.itl), ("end to end", figures.e2e))
    for name, spread in rows:
        table.add_row(name, *map(duration, (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)))
    console.print(table)
    for text, count in figures.errors.items():
        console.print(f"{count} failed: {text}", style="red", markup=False)


def _write(options: dict[str, Any], outcomes: Sequence[Outcome], figures: BenchFigures, server: Server) -> None:
    if options["report"] is None and options["plot"] is None:
        return
    from paceline_cli.bench_report import draw, write_report  # matplotlib takes a second to load

    if options["report"] is not None:
        title, command = f"{server.model} at {server.url}", shlex.join(["paceline", *sys.argv[1:]])
        write_report(options["report"], outcomes, figures, options["slo"], title=title, command=command)
        click.echo(f"report in {options['report']}", err=True)
    if options["plot"] is not None:
        draw(options["plot"], outcomes, options["slo"])
        click.echo(f"plots in {options['plot']}", err=True)
