"""`paceline local up | down | status | kubeconfig`: the life of a stack."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paceline_cli.local_common import console_of_output, home_option
from paceline_cli.numbers import FiniteRange
from paceline_local.errors import LocalError
from paceline_local.leftovers import is_up, lock_stack, remove_home, remove_leftovers
from paceline_local.processes import ProcessId, identify
from paceline_local.state import StateDir, read_json

__all__ = ["down", "kubeconfig", "status", "up"]

_POLL_S = 0.1
_TOLD_S = 20.0  # on a machine that has much else to do
_LOCK_PATIENCE_S = 1.0  # for a command that only looks whether a stack is up
_UP_TIMEOUT_S = 120.0
_DOWN_TIMEOUT_S = 90.0  # pods' grace, then the control plane's


@click.command()
@home_option
@click.option("--operator/--no-operator", default=True, help="Run the operator, too (or start your own).")
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    default=_UP_TIMEOUT_S,
    show_default=True,
    help="How long to wait until all of it is ready.",
)
def up(state: StateDir, operator: bool, timeout: float) -> None:
    """Start the control plane, the node agent and the operator, and wait until they are ready."""
    if is_up(state):
        raise LocalError(f"already up in {state.home} (kubeconfig {state.kubeconfig}): 'paceline local down' stops it")
    console = console_of_output()
    supervisor = _launch(state, operator=operator)
    try:
        with console.status("starting") as spinner:
            for line in _progress(state, supervisor, timeout):
                spinner.update(line)
    except BaseException:
        _stop(state, supervisor.pid)
        raise
    _say_how_to_use(console, state)


def _launch(state: StateDir, *, operator: bool) -> subprocess.Popen[bytes]:
    """Start the supervisor in a session of its own, so that it outlives this command and its terminal.

    It gets the lock from us: a `down` in the moments until it could take it would find no stack, and leave it running.
    """
    try:
        state.create()
    except OSError as error:
        raise LocalError(f"the state folder {state.home} can't be made: {error.strerror}") from error
    with lock_stack(state, patience=_LOCK_PATIENCE_S) as lock, state.log("supervisor").open("ab") as output:
        state.status.unlink(missing_ok=True)
        flags = ["--home", os.fspath(state.home), "--operator" if operator else "--no-operator", "--lock", str(lock)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline_local.supervisor", *flags],
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=state.home,
            start_new_session=True,
        )


def _progress(state: StateDir, supervisor: subprocess.Popen[bytes], timeout: float) -> Iterator[str]:
    """Yield what is going on until the stack is up. Raises `LocalError` if it won't be."""
    deadline = time.monotonic() + timeout
    while True:
        code, said = supervisor.poll(), read_json(state.status) or {}
        if said.get("phase") == "up":
            return
        if code is not None:
            raise LocalError(said.get("error") or f"the supervisor ended: {_last_line(state)}")
        if time.monotonic() > deadline:
            raise LocalError(f"not ready within {timeout:g} s: {_trouble(said)}")
        yield f"{said.get('phase', 'starting')} … {_trouble(said) if _restarted(said) else ''}"
        time.sleep(_POLL_S)


def _restarted(said: dict[str, Any]) -> bool:
    return any(child["restarts"] for child in said.get("children", {}).values())


def _trouble(said: dict[str, Any]) -> str:
    """Return what the children that aren't ready say."""
    waiting = {name: child for name, child in said.get("children", {}).items() if child["health"] != "ready"}
    return "; ".join(f"{name}: {child['message'] or child['health']}" for name, child in waiting.items()) or said.get(
        "phase", "the supervisor is starting"
    )


def _last_line(state: StateDir) -> str:
    from paceline_local.children import last_line

    return last_line(state.log("supervisor"))


def _say_how_to_use(console: Console, state: StateDir) -> None:
    said = read_json(state.status) or {}
    console.print(f"[green]up[/] ({said.get('controlPlane')} control plane, state in {state.home})", highlight=False)
    for line in (
        "paceline local apply -f examples/smollm2.yaml   # a manifest becomes pods",
        "paceline local get -w                           # watch it, with reasons",
        f"kubectl --kubeconfig {state.kubeconfig} get infsvc,pods",
        "paceline local down                             # stop everything",
    ):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@click.command()
@home_option
@click.option("--keep-state", is_flag=True, help="Keep objects and logs for the next 'up'.")
def down(state: StateDir, keep_state: bool) -> None:
    """Stop everything: operator, pods within their grace periods, node agent, control plane. May be run twice."""
    console = console_of_output()
    running = is_up(state)
    if running:
        with console.status("stopping pods and control plane"):
            _stop(state, _supervisor(state))
    ended = remove_leftovers(state)
    if not keep_state:
        _remove_state(state)
    if ended:
        console.print(f"ended {ended} processes that a killed supervisor had left", highlight=False)
    console.print("down" if running or ended else f"nothing was up in {state.home}", highlight=False)


def _supervisor(state: StateDir) -> int | None:
    """Return the supervisor's process number; one that was only just started tells it within a second or two."""
    deadline = time.monotonic() + _TOLD_S
    while is_up(state) and time.monotonic() < deadline:
        if pid := (read_json(state.status) or {}).get("pid"):
            return int(pid)
        time.sleep(_POLL_S)
    return None


def _stop(state: StateDir, pid: int | None) -> None:
    """Ask the supervisor to stop, kill it if it won't, and end what is left."""
    process = identify(pid) if pid else None
    if process is not None and process.alive:
        os.kill(process.pid, signal.SIGTERM)
        _await_end(process)
    if not is_up(state):  # another `up` may have been quicker: its processes are no leftovers
        remove_leftovers(state)


def _await_end(process: ProcessId) -> None:
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while process.alive:
        if time.monotonic() > deadline:
            os.kill(process.pid, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


# what a stack writes; nothing else in the folder is ours to delete
_OURS = ("apiserver", "logs", "pods", "claims", "kubeconfig", "status.json", "network.json", "services.json", "operator.key")


def _remove_state(state: StateDir) -> None:
    shutil.rmtree(state.scratch, ignore_errors=True)
    if state.foreign() is not None:
        return
    for name in _OURS:
        path = state.home / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if state.home.exists():
        remove_home(state)


@click.command()
@home_option
def status(state: StateDir) -> int:
    """Show the stack's own processes. Exit code 1 if it isn't up."""
    said = read_json(state.status) or {}
    console = console_of_output()
    if not is_up(state):
        console.print(f"not up (state folder {state.home})", highlight=False)
        return 1
    console.print(f"{said.get('phase')} ({said.get('controlPlane')} control plane, state in {state.home})", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("PROCESS", "STATE", "PID", "RESTARTS", "MESSAGE"):
        table.add_column(column)
    table.add_row("supervisor", "ready", str(said.get("pid")), "0", "")
    for name, child in said.get("children", {}).items():
        table.add_row(name, child["health"], str(child["pid"] or "-"), str(child["restarts"]), child["message"])
    console.print(table)
    return 0


@click.command()
@home_option
def kubeconfig(state: StateDir) -> None:
    """Print the path of the kubeconfig."""
    click.echo(state.kubeconfig)
