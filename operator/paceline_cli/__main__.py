"""Entry point of the `paceline` command: a group whose subcommands are loaded only when they are used."""

from __future__ import annotations

import importlib
import sys

import click

from paceline_core.main import run_command

__all__ = ["cli", "main"]

# subcommand → (module, attribute, extra that it needs, one line of help shown without importing it)
COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "bench": ("paceline_cli.bench", "bench", "demo", "Load any OpenAI-compatible server and measure it from outside."),
    "demo": ("paceline_cli.demo", "demo", "demo", "Show the main job: a manifest becomes batching pods that answer."),
    "lab": ("paceline_cli.lab", "lab", "", "See batching: slots over time in a browser, scenarios or a live pod."),
    "local": ("paceline_cli.local", "local", "operator", "Run a control plane, the operator and pods on this machine."),
    "plan": ("paceline_cli.plan", "plan", "", "Say how many replicas of what a load needs, with the arithmetic."),
    "simulate": ("paceline_cli.simulate", "simulate", "", "Replay requests through the scheduler: what would happen if…"),
    "tune": ("paceline_cli.tune", "tune", "operator", "See what tuning does and why; make its decisions again."),
    "top": ("paceline_cli.top", "top", "operator", "Watch a fleet: load, latency against objectives, the tuner."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is called, so that `paceline simulate` never loads the operator."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand; a missing extra gives a line that says how to install it."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, extra, _ = COMMANDS[cmd_name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not extra or (error.name or "").startswith("paceline"):
                raise
            raise click.ClickException(
                f"'paceline {cmd_name}' needs the package {error.name}: pip install 'paceline[{extra}]'"
            ) from error
        assert isinstance(command, click.Command), cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][3]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paceline")
def cli() -> None:
    """Paceline: batching inference pods from a manifest, tuned while they run.

    Start here:  paceline demo
    """


def _invoke() -> object:
    try:
        return cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:  # a group without a subcommand is a question, not a mistake
        click.echo(shown.format_message())
        return 0


def main() -> None:
    """Run the command line; errors end as one line on stderr and exit code 2."""
    sys.exit(run_command(_invoke, errors=(click.ClickException,), interrupts=(click.Abort,)))


if __name__ == "__main__":
    main()
