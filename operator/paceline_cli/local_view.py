"""How `paceline local get` shows things: InferenceServices with the reasons behind their state, and server-made tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline_local.manifests import Manifest, age, condition
from paceline_operator.names import base_name, belongs

__all__ = ["pod_trouble", "services_view", "table_view"]

_GOOD = {"True": "green", "False": "red", "Unknown": "yellow"}
# conditions whose False isn't a fault
_NEUTRAL = frozenset({"Progressing", "Recommended", "Tuned", "UpgradeAvailable"})


def _table(*columns: str) -> Table:
    """Return a table whose last column takes the rest of the line and folds; the others are words that stay whole."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="")
    *short, last = columns
    for column in short:
        table.add_column(column, no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def table_view(answer: Manifest, *, wide: bool) -> str:
    """Return a `Table` answer of the API server as text, columns of lower priority only if `wide`. Lines aren't folded:
    names must stay whole, for people who copy them and for programs that read them."""
    definitions = answer.get("columnDefinitions") or ()
    shown = [i for i, column in enumerate(definitions) if wide or not column.get("priority")]
    rows = answer.get("rows") or ()
    if not rows:
        return "nothing found"
    places = [str(((row.get("object") or {}).get("metadata") or {}).get("namespace") or "") for row in rows]
    lines = [[str(definitions[i]["name"]).upper() for i in shown]] + [
        [_cell(row["cells"][i]) for i in shown] for row in rows
    ]
    if len(set(places)) > 1:
        lines = [[place, *line] for place, line in zip(["NAMESPACE", *places], lines, strict=True)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("   ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def services_view(services: list[Manifest], pods: list[Manifest], local: dict[str, str], now: float) -> RenderableType:
    """Return all InferenceServices, each with its conditions and with what its pods wait for.

    `local` has the addresses where Services answer on this machine, by `namespace/name`.
    """
    if not services:
        return Text("no InferenceServices: try 'paceline local apply -f examples/smollm2.yaml'")
    return Group(*(part for service in services for part in _service(service, pods, local, now)))


def _service(service: Manifest, pods: list[Manifest], local: dict[str, str], now: float) -> list[RenderableType]:
    meta, status = service["metadata"], service.get("status") or {}
    ready = (condition(service, "Ready") or {}).get("status", "Unknown")
    mine = [pod for pod in pods if belongs(pod, service)]
    address = local.get(f"{meta['namespace']}/{base_name(meta['name'])}") or status.get("url")
    facts = (status.get("strategy"), address, age(meta["creationTimestamp"], now))  # a bad spec has no strategy yet
    head = Text.assemble(
        (f"{meta['namespace']}/{meta['name']}", "bold"),
        "  ",
        ("Ready" if ready == "True" else "not Ready", _GOOD.get(ready, "yellow")),
        f"  {status.get('readyReplicas', 0)}/{service['spec'].get('replicas', 1)} pods",
        *(f"  {fact}" for fact in facts if fact),
    )
    conditions = _table("  CONDITION", "STATUS", "REASON", "MESSAGE")
    for item in status.get("conditions") or ():
        colour = "" if item["type"] in _NEUTRAL else _GOOD.get(item["status"], "")
        row = ("  " + item["type"], item["status"], item.get("reason") or "", item.get("message") or "")
        conditions.add_row(*(Text(cell, style=colour if i == 1 else "") for i, cell in enumerate(row)))
    troubles = [Text(f"  {pod['metadata']['name']}: {why}", style="yellow") for pod in mine if (why := pod_trouble(pod))]
    return [head, conditions, *troubles, Text()]


def pod_trouble(pod: Manifest) -> str | None:
    """Return why a pod isn't ready, in the words of its conditions and containers; None if it is."""
    ready = condition(pod, "Ready")
    if ready is not None and ready["status"] == "True":
        return None
    scheduled = condition(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return str(scheduled["message"])
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    reasons = [why for container in statuses if not container["ready"] and (why := _container_trouble(container))]
    return "; ".join(reasons) or (ready or {}).get("message") or "not started yet"


def _container_trouble(container: Manifest) -> str:
    """Return what a container waits for or how it ended, with the last line that it printed."""
    state = container.get("state") or {}
    waiting, ended = state.get("waiting"), state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    said = [waiting.get("reason") or "", waiting.get("message") or ""] if waiting else []
    if ended:
        lines = str(ended.get("message") or "").strip().splitlines()  # the end of a log says what went wrong
        said += [f"ended with exit code {ended['exitCode']}", *lines[-1:]]
    return ": ".join(word for word in said if word)
