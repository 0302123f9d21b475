"""`paceline local`: a control plane, the operator and pods on this machine."""

from __future__ import annotations

import importlib

import click

__all__ = ["local"]

# subcommand → module; each is imported when it is used, so that `paceline local logs` doesn't load an API client
_COMMANDS = {
    "apply": "paceline_cli.local_apply",
    "delete": "paceline_cli.local_delete",
    "describe": "paceline_cli.local_describe",
    "down": "paceline_cli.local_stack",
    "get": "paceline_cli.local_get",
    "kubeconfig": "paceline_cli.local_stack",
    "logs": "paceline_cli.local_logs",
    "status": "paceline_cli.local_stack",
    "up": "paceline_cli.local_stack",
}


class _Group(click.Group):
    """A group that imports a subcommand when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(_COMMANDS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command), cmd_name
        return command


@click.group(cls=_Group)
def local() -> None:
    """Run a control plane, the operator and pods on this machine.

    A development tool, never a cluster: pods are plain processes of yours, on loopback addresses. The same manifests, the
    same operator and the same runtime as in a cluster; kubectl works.

    \b
    Start here:
      paceline local up
      paceline local apply -f examples/smollm2.yaml
      paceline local get -w
      paceline local down
    """
