"""A rank of a tensor-parallel group that isn't the first: computes its part of whatever the first one says.

Started as `python -m paceline_runtime.parallel_worker RANK SIZE BACKEND STORE` with the engine's settings as one JSON line
on stdin. The messages follow there; their end is its end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from paceline_core.errors import PacelineError
from paceline_core.knobs import knobs_from_wire
from paceline_runtime.logs import log_event, set_up_logging
from paceline_runtime.parallel_link import READY
from paceline_runtime.parallel_messages import read_message
from paceline_runtime.settings import EngineSettings

__all__ = ["main"]


def main() -> int:
    """Load this rank's part of the model and follow the first rank; the exit code tells whether all went well."""
    rank, size, backend, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first rank decides; its end is the end of stdin
    orders, words = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no word to the first rank
    settings = msgspec.json.decode(orders.readline(), type=EngineSettings)
    set_up_logging(settings.log_format, f"rank {rank}")
    try:
        _follow(settings, rank, size, backend, store, orders, words)
    except (PacelineError, OSError, MemoryError) as error:
        log_event("rank_failed", level=logging.ERROR, reason=" ".join(str(error).split()))
        return 1
    return 0


def _follow(
    settings: EngineSettings, rank: int, size: int, backend: str, store: str, orders: BinaryIO, words: BinaryIO
) -> None:
    from paceline_runtime.backend import load_follower
    from paceline_runtime.parallel_start import join_group

    words.write(READY)
    words.flush()
    join_group(rank, size, backend, store)
    follower = load_follower(settings, knobs_from_wire(settings.knobs), rank)
    while (message := read_message(orders)) is not None:
        follower.run(message)


if __name__ == "__main__":
    sys.exit(main())
