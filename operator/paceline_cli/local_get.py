"""`paceline local get`: objects of the stack; by default its InferenceServices and why they aren't ready."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click
import yaml
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from paceline_cli.local_common import console_of_output, home_option, with_client
from paceline_cli.local_kinds import find_kind
from paceline_cli.local_view import services_view, table_view
from paceline_local.errors import ApiUnavailable, LocalError
from paceline_local.manifests import Manifest, key_of
from paceline_local.resources import INFERENCE_SERVICES, PODS, SERVICES
from paceline_local.state import StateDir

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["get"]

_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
_REFRESH_S = 0.5
_ANNOTATION = "paceline.io/local-address"


@click.command()
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("-n", "--namespace", default=None, help="Only this namespace [default: all, or 'default' for one object].")
@click.option("-o", "--output", type=click.Choice(["wide", "yaml", "json"]), help="More columns, or whole objects.")
@click.option("-w", "--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
@home_option
def get(kind: str | None, name: str | None, namespace: str | None, output: str | None, watch: bool, state: StateDir) -> None:
    """Show objects: InferenceServices with their conditions, or any KIND, or one object by NAME."""
    if kind and "/" in kind and not name:
        kind, _, name = kind.partition("/")
    if output in ("yaml", "json"):
        found = with_client(state, lambda client: _objects(client, kind, name, namespace))
        click.echo(json.dumps(found, indent=2) if output == "json" else yaml.safe_dump(found, sort_keys=False), nl=False)
        return
    console, wide = console_of_output(), output == "wide"
    if not watch:
        view = with_client(state, lambda client: _view(client, kind, name, namespace, wide=wide))
        console.print(view, soft_wrap=isinstance(view, Text))
        return
    with_client(state, lambda client: _follow(client, console, kind, name, namespace, wide=wide))


async def _objects(client: ApiClient, kind: str | None, name: str | None, namespace: str | None) -> object:
    resource = await find_kind(client, kind) if kind else INFERENCE_SERVICES
    if name:
        return _plain(await client.get(resource, name, namespace or "default"))
    items = (await client.list(resource, namespace)).items
    return {"apiVersion": "v1", "kind": "List", "items": [_plain(item) for item in items]}


def _plain(obj: Manifest) -> Manifest:
    """Return the object without the field managers' bookkeeping, as kubectl shows it."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return obj | {"metadata": metadata}


async def _view(
    client: ApiClient, kind: str | None, name: str | None, namespace: str | None, *, wide: bool
) -> RenderableType:
    resource = await find_kind(client, kind) if kind else INFERENCE_SERVICES
    if resource == INFERENCE_SERVICES and not wide:
        return await _services(client, name, namespace)
    path = resource.path(namespace or ("default" if name else None), name)
    answer = await client.request("GET", path, accept=_TABLE)
    if answer.get("kind") != "Table":
        raise LocalError(f"the API server makes no table of {resource.plural}: use -o yaml")
    return Text(table_view(answer, wide=wide), no_wrap=True)


async def _services(client: ApiClient, name: str | None, namespace: str | None) -> RenderableType:
    if name:
        services = [await client.get(INFERENCE_SERVICES, name, namespace or "default")]
    else:
        services = (await client.list(INFERENCE_SERVICES, namespace)).items
    pods = (await client.list(PODS, namespace)).items
    return services_view(services, pods, await _addresses(client, namespace), time.time())


async def _addresses(client: ApiClient, namespace: str | None) -> dict[str, str]:
    """Return where each Service answers on this machine."""
    found = {}
    for service in (await client.list(SERVICES, namespace)).items:
        address = (service["metadata"].get("annotations") or {}).get(_ANNOTATION)
        ports = service["spec"].get("ports") or ()
        if address and ports:
            found[key_of(service)] = f"http://{address}:{ports[0]['port']}"
    return found


async def _follow(
    client: ApiClient, console: Console, kind: str | None, name: str | None, namespace: str | None, *, wide: bool
) -> None:
    """Show the view again and again: in place on a terminal, else as text whenever it has changed."""
    last = ""
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            view = await _latest(client, kind, name, namespace, wide=wide)
            if live is not None:
                live.update(view, refresh=True)
            elif (text := _text(console, view)) != last:
                click.echo(text, nl=False)
                last = text
            await asyncio.sleep(_REFRESH_S)


async def _latest(
    client: ApiClient, kind: str | None, name: str | None, namespace: str | None, *, wide: bool
) -> RenderableType:
    """Return the view; an API server that is away for a moment is said, not fatal."""
    try:
        return await _view(client, kind, name, namespace, wide=wide)
    except ApiUnavailable as error:
        return Text(str(error), style="yellow")


def _text(console: Console, view: RenderableType) -> str:
    with console.capture() as capture:
        console.print(view, soft_wrap=isinstance(view, Text))
    return capture.get()
