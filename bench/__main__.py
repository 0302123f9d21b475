"""Runs the benchmarks that fit any machine; each writes its results under bench/results.

The others take from minutes to hours, want a quiet machine, or peers to compare with, and are run by name: `python -m
bench.NAME --help`. Those of the tuner are listed in docs/tuning.md.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("bench.twin", "bench.quality")


def main() -> int:
    for name in BENCHMARKS:
        code = importlib.import_module(name).main([])
        if code:
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
