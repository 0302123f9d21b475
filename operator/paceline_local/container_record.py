"""What a container's record on disk holds, so that a restarted node agent goes on where the last one stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline_local.container_state import ContainerState, Termination, exit_of
from paceline_local.processes import ProcessId
from paceline_local.state import read_json, write_json

__all__ = ["Record", "load_record", "newest_log", "save_record", "tail", "trim_log"]

_TAIL_BYTES, _TAIL_LINES = 2048, 80  # what Kubernetes allows for FallbackToLogsOnError
_KEPT_RUNS = 3
LOG_LIMIT = 10 * 2**20  # bytes; then the file is moved aside once, as with Kubernetes' containerLogMaxSize


@dataclass(frozen=True, slots=True)
class Record:
    """A container's state, its failures in a row (for the back-off) and the number of its run (names the log file)."""

    state: ContainerState = field(default_factory=ContainerState)
    failures: int = 0
    run: int = -1


def save_record(path: Path, record: Record) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(record))


def load_record(path: Path, now: float) -> Record:
    """Return the record on disk; a process that ended while nobody watched shows as ended with an unknown exit code."""
    stored = read_json(path)
    try:
        return _record(stored, now) if stored is not None else Record()
    except (KeyError, TypeError):  # another version's; the processes that it speaks of are ended before the next start
        return Record()


def _record(stored: Any, now: float) -> Record:
    raw = stored["state"]
    last = Termination(**raw["last"]) if raw["last"] else None
    ended = Termination(**raw["ended"]) if raw["ended"] else None
    process = ProcessId(**raw["process"]) if raw["process"] else None
    restored = {field: raw[field] for field in ("started_at", "restarts", "started", "ready")}
    state = ContainerState(waiting=None, process=process, ended=ended, last=last, **restored)
    if process is not None and not process.alive:
        state = state.terminated(exit_of(None, "", state.started_at, now))
    return Record(state, stored["failures"], stored["run"])


def newest_log(folder: Path, *, back: int = 0) -> Path | None:
    """Return the log file of the last run (or of the one `back` runs before it), None if there is none."""
    runs = sorted((path for path in folder.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))
    return runs[-1 - back] if len(runs) > back else None


def forget_old_logs(folder: Path) -> None:
    """Keep the logs of the last few runs only."""
    runs = sorted((path for path in folder.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))
    for path in runs[:-_KEPT_RUNS]:
        path.unlink(missing_ok=True)
        path.with_suffix(".log.old").unlink(missing_ok=True)


def tail(path: Path) -> str:
    """Return the last lines of a log, as much as a termination message may hold."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def trim_log(path: Path) -> None:
    """Move a log that is too large aside. The writer appends to the same file, so it is copied and cut, not renamed:
    what is written between the two calls is lost."""
    try:
        if path.stat().st_size <= LOG_LIMIT:
            return
        path.with_suffix(".log.old").write_bytes(path.read_bytes())
        with path.open("r+b") as file:
            file.truncate(0)
    except FileNotFoundError:
        return
