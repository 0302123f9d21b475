"""The machine that a result is of."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> str:
    """Return processor, cores, Python and the load average, in one line."""
    load = os.getloadavg()[0]
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, load average {load:.1f} after it"
