"""What the drivers of engines without a server share. Runs inside the engine's own environment: nothing of ours is there.

Protocol, one JSON document a line: the driver says `{"ready": "<version>"}`; for each `[{"prompt": […], "output": n}, …]` on
stdin it answers `[{"tokens": […], "first": s, "last": s}, …]`, seconds from the moment it had read the line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Jobs = list[dict[str, Any]]


def serve(version: str, run: Callable[[Jobs, Callable[[], float]], list[dict[str, Any]]]) -> None:
    """Answer each line of jobs by what `run(jobs, clock)` returns; the clock starts with each line."""
    # libraries print what they like: the protocol has a descriptor of its own
    with os.fdopen(os.dup(1), "w") as out, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        print(json.dumps({"ready": version}), file=out, flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            replies = run(json.loads(line), lambda began=began: time.perf_counter() - began)
            print(json.dumps(replies), file=out, flush=True)
