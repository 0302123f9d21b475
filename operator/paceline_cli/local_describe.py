"""`paceline local describe`: one object with its conditions and events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline_cli.local_common import console_of_output, home_option, namespace_option, with_client
from paceline_cli.local_kinds import find_kind
from paceline_local.manifests import Manifest, age
from paceline_local.resources import EVENTS, INFERENCE_SERVICES
from paceline_local.state import StateDir

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["describe"]


@click.command()
@click.argument("kind")
@click.argument("name", required=False)
@namespace_option
@home_option
def describe(kind: str, name: str | None, namespace: str, state: StateDir) -> None:
    """Show one object, its conditions and what happened to it. A single word names an InferenceService."""
    if name is None:
        kind, _, name = kind.rpartition("/")
    console_of_output().print(with_client(state, lambda client: _describe(client, kind, name, namespace)))


async def _describe(client: ApiClient, kind: str, name: str, namespace: str) -> RenderableType:
    resource = await find_kind(client, kind) if kind else INFERENCE_SERVICES
    obj = await client.get(resource, name, namespace)
    events = (await client.list(EVENTS, namespace if resource.namespaced else "default")).items
    mine = [event for event in events if event["involvedObject"].get("uid") == obj["metadata"]["uid"]]
    obj["metadata"].pop("managedFields", None)
    conditions = (obj.get("status") or {}).pop("conditions", None) or ()
    return Group(
        Text(yaml.safe_dump(obj, sort_keys=False, allow_unicode=True)),
        _rows(("CONDITION", "STATUS", "REASON", "MESSAGE"), [_condition(c) for c in conditions]),
        Text(),
        _rows(("AGE", "TYPE", "REASON", "COUNT", "MESSAGE"), [_event(e) for e in sorted(mine, key=_last_seen)]),
    )


def _rows(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _condition(item: Manifest) -> tuple[str, ...]:
    return item["type"], item["status"], item.get("reason") or "", item.get("message") or ""


def _last_seen(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _event(event: Manifest) -> tuple[str, ...]:
    seen, count = age(_last_seen(event), time.time()), str(event.get("count") or 1)
    return seen, event.get("type") or "", event.get("reason") or "", count, event.get("message") or ""
