"""The machine that a result is of."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


# It looks for its parent, so that it doesn't stay for ever if that is killed.
_BURNER = """
import os, sys
cores = sys.argv[1]
if cores:
    os.sched_setaffinity(0, {int(cores)})
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_process(core: int | None = None) -> Iterator[int]:
    """Keep one core (None: any) busy within, by another process of the same priority; gives its id."""
    command = [sys.executable, "-c", _BURNER, "" if core is None else str(core), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()
