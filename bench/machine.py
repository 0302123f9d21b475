"""The machine that a result is of."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Return processor, cores, Python and the load average, in one line."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, load average {load:.1f} after it"
