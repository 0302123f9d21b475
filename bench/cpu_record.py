"""What bench.cpu has measured so far, kept in one file between goes, and the page of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cpu_contestants import CONTESTANTS
from bench.cpu_report import Ratio, Row, page, ratios, rows_of
from bench.cpu_runs import Run
from bench.cpu_workload import Workload
from bench.machine import machine, processor
from bench.roofline import Roofline, measure

GOOD = ("default", "fp32", "bf16", "int8")  # forms of ours whose perplexity is within 1 % of fp32's (bench.quality)
GUESS = 120.0  # seconds of a run that was never made


@dataclass(slots=True)
class Record:
    """Runs of one machine, its limits, and who failed in this go."""

    path: Path
    roofline: Roofline
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, *, fresh: bool, look: bool) -> Record:
        """Return what is at `path`, an empty one if there is nothing or it is to be `fresh`; `look` at the limits again.

        Raises `SystemExit` for a record of another processor: figures of two machines can't be compared.
        """
        if fresh or not path.exists():
            return cls(path, measure())
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["processor"] != processor():
            raise SystemExit(f"{path} is of another machine ({document['processor']}): give --fresh or another --out")
        limits = Roofline(**document["roofline"])
        return cls(path, limits.best_of(measure()) if look else limits, [Run(**run) for run in document["runs"]])

    def expected(self, contestant: str) -> float:
        """Return how many seconds a run of it took at most."""
        return max((run.took for run in self.runs if run.contestant == contestant), default=GUESS)

    def write(self, work: Workload) -> str:
        """Write the file, renamed when whole since a go may be ended at any time, and return the page."""
        rows, busy = rows_of(self.runs), rows_of(self.runs, busy=True)
        found = ratios(rows, GOOD, work.name)
        ran = {run.contestant for run in self.runs}
        absent = {c.name: "not run yet" for c in CONTESTANTS if c.name not in ran}
        absent |= {c.name: f"{c.missing} isn't there" for c in CONTESTANTS if c.missing is not None} | self.failed
        versions = sorted({run.version for run in self.runs})
        document = {
            "processor": processor(), "machine": machine(), "roofline": asdict(self.roofline), "versions": versions,
            "absent": absent, "rows": [_row(row) for row in rows], "busy": [_row(row) for row in busy],
            "ratios": [_ratio(ratio) for ratio in found], "runs": [asdict(run) for run in self.runs],
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        draft.rename(self.path)
        return page(rows, found, work, self.roofline, machine(), absent, versions, busy)


def _row(row: Row) -> dict[str, Any]:
    head = {"contestant": row.contestant.name, "precision": row.contestant.precision, "slots": row.slots}
    return {**head, "rounds": row.rounds, **row.figures, "spread": row.spread, "same_texts": row.same_texts}


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {**asdict(ratio), "reached": ratio.reached}
