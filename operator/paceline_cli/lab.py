"""`paceline lab`: the Batching Lab in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import click

from paceline_cli.lab_server import LabServer, Pod

__all__ = ["lab"]

EPILOG = """\b
Examples:
  paceline lab                                   # scenarios: strategies side by side
  paceline lab --live http://127.0.0.11:9000 --token-file token   # a running pod
"""


def _parse_url(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        known = False
    if not known:
        raise click.BadParameter(f"{value!r} is no address of an admin port, as in http://127.0.0.11:9000")
    return value.rstrip("/")


@click.command(epilog=EPILOG)
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, metavar="PORT", help="Port on loopback [default: a free one]."
)
@click.option("--live", "live", callback=_parse_url, metavar="URL", help="Admin port of a pod to watch.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --live: the file with the pod's admin token.",
)
@click.option("--open/--no-open", "open_", default=False, help="Open it in the default browser.")
def lab(port: int, live: str | None, token_file: Path | None, open_: bool) -> None:
    """Show how batching works: requests in slots over time, under the production scheduler, in a browser.

    Pick a strategy, lengths, slots and chunks of prompts, play, step, and compare two settings side by side. With --live the
    same page follows a running pod: who is in each step, where a request's time went, when knobs changed.
    """
    if token_file is not None and live is None:
        raise click.UsageError("--token-file needs --live URL")
    try:
        server = LabServer(port, None if live is None else Pod(live, token_file))
    except OSError as error:
        raise click.ClickException(f"port {port} can't be used: {error.strerror}; choose another with --port") from error
    url = server.url + ("#live" if live else "")
    click.echo(f"Batching Lab at {url}  (Ctrl-C ends it)")
    if open_:
        webbrowser.open(url)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()
