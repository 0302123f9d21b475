"""`paceline tune status | explain | replay`: what tuning does, in words, and its decisions made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paceline_cli.kube import kube_client
from paceline_cli.local_common import console_of_output
from paceline_cli.tune_text import explain_service
from paceline_core.errors import PacelineError

__all__ = ["tune"]

_KUBECONFIG = click.option(
    "--kubeconfig", envvar="KUBECONFIG", type=click.Path(path_type=Path), metavar="FILE",
    help="Of the cluster [default: $KUBECONFIG, else that of 'paceline local'].",
)  # fmt: skip
_NAMESPACE = click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of the service.")


@click.group()
def tune() -> None:
    """See what the operator's tuning does, and why.

    \b
    Examples:
      paceline tune status
      paceline tune explain chat
      paceline tune replay decisions.jsonl
    """


@tune.command()
@_KUBECONFIG
@_NAMESPACE
def status(kubeconfig: Path | None, namespace: str) -> None:
    """Show all tuned services of a namespace in a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("SERVICE", "MODE", "STATE", "REASON", "ATTAINMENT", "APPLIED", "LAST CHANGE"):
        table.add_column(column)
    for service in _services(kubeconfig, namespace):
        tuning = (service.get("status") or {}).get("tuning") or {}
        last = tuning.get("lastChange") or {}
        table.add_row(
            service["metadata"]["name"],
            tuning.get("mode") or "-",
            tuning.get("state") or "-",
            tuning.get("reason") or "-",
            _share((tuning.get("observed") or {}).get("sloAttainment")),
            ", ".join(f"{name} {value}" for name, value in (tuning.get("applied") or {}).items()) or "-",
            f"{last.get('outcome')} {last.get('time')}" if last else "-",
        )
    console_of_output().print(table)


@tune.command()
@click.argument("name")
@_KUBECONFIG
@_NAMESPACE
def explain(name: str, kubeconfig: Path | None, namespace: str) -> int:
    """Say in plain words what tuning of the service NAME sees, recommends and did."""
    found = next((s for s in _services(kubeconfig, namespace) if s["metadata"]["name"] == name), None)
    if found is None:
        click.echo(f"there is no InferenceService {name} in namespace {namespace}", err=True)
        return 1
    for line in explain_service(found):
        console_of_output().print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


@tune.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the decisions as JSON, one a line.")
def replay(file: Path, as_json: bool) -> int:
    """Make every decision of a log again, offline. Exit code 1 if one comes out otherwise.

    FILE is what the operator writes with PACELINE_TUNING_LOG: each line holds everything that a decision depended on.
    """
    from paceline_operator.tuning.replay import replay as run

    different, console = 0, Console()
    for question, logged, decision in run(file):
        same = json.loads(json.dumps(decision.to_json())) == logged
        different += not same
        if as_json:
            click.echo(json.dumps({"service": question.service, "at": question.at, "same": same, **decision.to_json()}))
        else:
            mark = "[green]same[/]" if same else "[red]different[/]"
            console.print(f"{question.service} {decision.kind} {decision.reason}: ", end="", markup=False, highlight=False)
            console.print(decision.message, end=" ", markup=False, highlight=False, soft_wrap=True)
            console.print(mark)
            if not same:
                console.print(f"  logged: {logged['kind']} {logged['reason']}: {logged['message']}", markup=False)
    return 1 if different else 0


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _services(kubeconfig: Path | None, namespace: str) -> list[Mapping[str, Any]]:
    """Return the InferenceServices of a namespace. Raises `ClickException` if they can't be listed."""
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    from paceline_local.state import state_dir
    from paceline_operator.names import GROUP, PLURAL, VERSION

    try:
        api = client.CustomObjectsApi(kube_client(kubeconfig or state_dir(None).kubeconfig))
        found: Any = api.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL)
        return list(found["items"])
    except (PacelineError, ApiException, HTTPError, OSError) as error:
        words = getattr(error, "reason", None) or error
        raise click.ClickException(f"the services can't be listed: {words}; is a stack up, or KUBECONFIG set?") from None
