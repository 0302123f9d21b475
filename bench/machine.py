"""The machine that a result is of."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline_runtime.heap import engine_environment


def processor() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> str:
    """Return processor, cores, Python and the load average, in one line."""
    load = os.getloadavg()[0]
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, load average {load:.1f} after it"


def in_large_pages(module: str, arguments: Sequence[str] | None) -> None:
    """Start `python -m module` anew with memory in large pages, as an engine's process has it, unless it has it already.

    The allocators read their settings when a process starts, so nothing later can make up for it.
    """
    wanted = engine_environment(os.environ, len(os.sched_getaffinity(0)))
    if wanted != dict(os.environ):
        given = sys.argv[1:] if arguments is None else arguments
        os.execve(sys.executable, [sys.executable, "-m", module, *given], wanted)
