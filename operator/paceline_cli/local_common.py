"""What the subcommands of `paceline local` share: the state folder, the client, how errors look."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console

from paceline_local.errors import LocalError
from paceline_local.leftovers import is_up
from paceline_local.state import HOME_VARIABLE, StateDir, state_dir

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["console_of_output", "home_option", "namespace_option", "require_up", "with_client"]

_PIPE_WIDTH = 240

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


def home_option(function: F) -> F:
    """Add `--home`; the command gets a `StateDir` as `state`."""
    option = click.option(
        "--home",
        "state",
        metavar="DIR",
        default=None,
        callback=lambda _ctx, _param, value: state_dir(value),
        help=f"State folder of the stack [default: ${HOME_VARIABLE} or ~/.paceline/local].",
    )
    return option(function)


def namespace_option(function: F) -> F:
    """Add `-n/--namespace`."""
    return click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of the objects.")(
        function
    )


def console_of_output() -> Console:
    """Return a console for tables: as wide as the terminal, and wide enough not to fold where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def require_up(state: StateDir) -> None:
    """Raise `LocalError` unless the stack runs."""
    if not is_up(state):
        raise LocalError(f"no stack is up in {state.home}: run 'paceline local up' first")


def with_client(state: StateDir, work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Run asynchronous work with a client of the stack's API server. Raises `LocalError` if the stack isn't up."""
    from paceline_local.client import ApiClient

    require_up(state)

    async def run() -> T:
        async with ApiClient.from_kubeconfig(state.kubeconfig) as client:
            return await work(client)

    return asyncio.run(run())
