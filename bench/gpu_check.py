"""Checks and measures everything on one GPU in less than eight minutes: `make gpu-check`.

    PYTHONPATH=runtime:kernels python -m bench.gpu_check [--dry] [--out FOLDER] [--only NAME …]

Needs Python with torch, triton and transformers, no installed Paceline and no network. Each section runs in a process of its
own under a time limit, so that one that hangs or crashes costs only itself; results are written after each, as JSON and as
Markdown, to bench/results (and to $OUT, where it is set). `--dry` runs every section on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.report import markdown
from bench.gpu.section import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
TOTAL_SECONDS = 470
DRY_SECONDS = 600  # for each section: the interpreter on a busy machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; the exit code tells whether all ended and nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny, to prove the script")
    parser.add_argument("--out", type=Path, help="default: bench/results, for a dry run out/gpu-check")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be repeated")
    options = parser.parse_args(arguments)
    out = options.out or (ROOT / "out" / "gpu-check" if options.dry else ROOT / "bench" / "results")
    document: dict[str, Any] = {
        "dry": options.dry,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sections": {},
    }
    deadline = time.monotonic() + TOTAL_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or SECTIONS:
            limit = DRY_SECONDS if options.dry else min(SECTIONS[name][1], deadline - time.monotonic())
            document["sections"][name] = section = run_section(name, Path(folder), limit, dry=options.dry)
            write(document, out)
            print(f"{name}: {section['state']} after {section['seconds']:.0f} s", flush=True)
    return 0 if all(sound(section) for section in document["sections"].values()) else 1


def run_section(name: str, folder: Path, limit: float, *, dry: bool) -> dict[str, Any]:
    """Run one section in a process of its own and return its results, also those of one that was cut off."""
    if limit <= 0:
        return {"state": "left out: no time was left", "seconds": 0.0, "results": {}}
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", "bench.gpu.section", name, str(path), "--measured", str(folder / "device.json")]
    began = time.monotonic()
    process = subprocess.Popen([*command, *(["--dry"] if dry else [])], cwd=ROOT, env=_environment(dry=dry))
    try:
        code = process.wait(limit)
        state = "done" if code == 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        state = f"cut off by its limit of {limit:.0f} s"
    results = json.loads(path.read_text()) if path.exists() else {}
    return {"state": state, "seconds": time.monotonic() - began, "results": results}


def _environment(*, dry: bool) -> dict[str, str]:
    paths = [str(ROOT / part) for part in ("runtime", "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    return environment | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {})


def sound(section: Mapping[str, Any]) -> bool:
    """Tell whether a section ended and nothing in it is wrong; a peer that doesn't run is no fault."""
    rows = [row for table in ("cases", "tokens") for row in section["results"].get(table, [])]
    broken = [row for row in section["results"].get("failed", []) if "kernel" in row]
    return section["state"] == "done" and not broken and all(row["good"] for row in rows)


def write(document: Mapping[str, Any], out: Path) -> None:
    """Write what there is so far."""
    for folder in [out, *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_check.json").write_text(json.dumps(document, indent=1) + "\n")
        (folder / "gpu_check.md").write_text(markdown(document) + "\n")


if __name__ == "__main__":
    sys.exit(main())
