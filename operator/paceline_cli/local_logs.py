"""`paceline local logs`: what pods and the stack's own processes print. Reads files, so it works without the API server."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from paceline_cli.local_common import home_option, namespace_option
from paceline_local.container_record import newest_log
from paceline_local.errors import LocalError
from paceline_local.state import StateDir
from paceline_operator.names import base_name

__all__ = ["find_streams", "logs"]

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Stream:
    """One log: `label` says whose, `newest` finds its present file (a restart begins a new one)."""

    label: str
    newest: Callable[[], Path | None]


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--tail", "lines", type=click.IntRange(0), default=None, help="Only the last lines of each log.")
@click.option("-c", "--container", default=None, help="Only this container.")
@click.option("-p", "--previous", is_flag=True, help="The run before the present one.")
@namespace_option
@home_option
def logs(
    name: str, follow: bool, lines: int | None, container: str | None, previous: bool, namespace: str, state: StateDir
) -> None:
    """Print logs of NAME: an InferenceService or Deployment (all its pods), a pod, or one of the stack's own processes.

    The stack's own are operator, apiserver, node, services and supervisor (etcd and controller-manager with real binaries).
    """
    streams = find_streams(state, name, namespace, container, back=int(previous))
    # whoever follows a service may get to see a second pod of it any time, as in a rollout
    prefixed = len(streams) > 1 or (follow and streams[0].label.partition("/")[0] != name.rpartition("/")[2])
    positions = {stream.label: _print_tail(stream, lines, prefixed=prefixed) for stream in streams}
    while follow:
        time.sleep(_POLL_S)
        for stream in find_streams(state, name, namespace, container, back=0, known=bool(positions)):
            positions[stream.label] = _print_new(stream, positions.get(stream.label), prefixed=prefixed)


def find_streams(
    state: StateDir, name: str, namespace: str, container: str | None, *, back: int, known: bool = False
) -> list[Stream]:
    """Return the logs that a name means. Raises `LocalError` if it means none (and none were `known` before)."""
    own = state.log(name)
    if own.exists() and "/" not in name:
        return [Stream(name, lambda: own)]
    pods = sorted(folder for folder in state.pods.glob("*_*_*") if _means(folder.name, name.rpartition("/")[2], namespace))
    streams = [
        Stream(f"{pod.name.split('_')[1]}/{folder.name}", _finder(folder, back))
        for pod in pods
        for folder in sorted((pod / "logs").glob("*"))
        if container in (None, folder.name)
    ]
    if not streams and not known:
        raise LocalError(_nothing(state, name, namespace, bool(pods)))
    return streams


def _finder(folder: Path, back: int) -> Callable[[], Path | None]:
    return lambda: newest_log(folder, back=back)


def _means(folder: str, name: str, namespace: str) -> bool:
    """Whether a pod's folder belongs to a name: the pod's own, or that of the Deployment or InferenceService above it."""
    where, pod, _ = folder.split("_", 2)
    above = rf"{re.escape(base_name(name))}-[a-z0-9]{{1,10}}-[a-z0-9]{{5}}"
    return where == namespace and (pod == name or re.fullmatch(above, pod) is not None)


def _nothing(state: StateDir, name: str, namespace: str, has_pods: bool) -> str:
    if has_pods:
        return f"{name} has printed nothing yet: 'paceline local get' says what it waits for"
    pods = sorted(f.name.split("_")[1] for f in state.pods.glob(f"{namespace}_*_*"))
    own = sorted(path.stem for path in state.logs.glob("*.log"))
    known = ", ".join([*pods, *own]) or "nothing has run yet"
    return f"no pod of {name!r} in namespace {namespace} on this machine; there are logs of: {known}"


def _print_tail(stream: Stream, lines: int | None, *, prefixed: bool) -> tuple[Path, int] | None:
    path = stream.newest()
    if path is None:
        return None
    with path.open("rb") as file:
        content: Iterator[bytes] | deque[bytes] = iter(file) if lines is None else deque(file, maxlen=lines)
        for line in content:
            _echo(stream, line, prefixed=prefixed)
        return path, file.tell()


def _print_new(stream: Stream, position: tuple[Path, int] | None, *, prefixed: bool) -> tuple[Path, int] | None:
    """Print what came since `position`; begin anew in a new file, or in one that was cut because it was too large."""
    path = stream.newest()
    if path is None:
        return position
    start = position[1] if position is not None and position[0] == path else 0
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            start = start if start <= file.tell() else 0
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the rest of it comes with the next look
                _echo(stream, line, prefixed=prefixed)
                start += len(line)
    except FileNotFoundError:
        return position
    return path, start


def _echo(stream: Stream, line: bytes, *, prefixed: bool) -> None:
    text = line.decode(errors="replace").rstrip("\n")
    click.echo(f"{stream.label}: {text}" if prefixed else text)
