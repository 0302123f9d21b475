"""`python -m paceline_local.apiserver --state DIR [--host ADDRESS] [--port N]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline_core.main import run_command
from paceline_local.apiserver.server import Settings, lock_state, serve

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it's told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline_local.apiserver", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of journal, certificates, token and kubeconfig")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return run_command(lambda: _run(Settings(given.state, given.host, given.port)), errors=(OSError,))


def _run(settings: Settings) -> None:
    lock = lock_state(settings.state)  # held by the process until it ends
    assert lock >= 0
    asyncio.run(serve(settings, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
