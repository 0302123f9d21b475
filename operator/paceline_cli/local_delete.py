"""`paceline local delete`: remove objects and wait until they are gone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from paceline_cli.local_apply import parse_manifests, read_manifests
from paceline_cli.local_common import home_option, namespace_option, with_client
from paceline_cli.local_kinds import discover, find_kind
from paceline_local.errors import ApiError, LocalError
from paceline_local.resources import Resource
from paceline_local.state import StateDir

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["delete"]

_POLL_S = 0.1
_TIMEOUT_S = 60.0


@click.command()
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("-f", "--filename", metavar="FILE", help="Delete what a file of manifests names; - is stdin.")
@click.option("--wait/--no-wait", default=True, help="Wait until the objects are gone.")
@namespace_option
@home_option
def delete(kind: str | None, name: str | None, filename: str | None, wait: bool, namespace: str, state: StateDir) -> None:
    """Delete an object by KIND and NAME (or KIND/NAME), or all objects of a file."""
    if kind and "/" in kind and not name:
        kind, _, name = kind.partition("/")
    if bool(filename) == bool(kind and name):
        raise click.UsageError("give either KIND and NAME, or -f FILE")
    with_client(state, lambda client: _delete(client, kind, name, filename, namespace, wait=wait))


async def _delete(
    client: ApiClient, kind: str | None, name: str | None, filename: str | None, namespace: str, *, wait: bool
) -> None:
    if kind and name:
        targets = [(await find_kind(client, kind), name, namespace)]
    else:
        targets = await _of_file(client, filename or "-", namespace)
    for resource, which, where in targets:
        await _one(client, resource, which, where, tolerant=bool(filename))
    for resource, which, where in targets if wait else ():
        await _gone(client, resource, which, where)


async def _of_file(client: ApiClient, filename: str, namespace: str) -> list[tuple[Resource, str, str]]:
    source, text = read_manifests(filename)
    targets = []
    for document in reversed(parse_manifests(text, source)):  # a namespace or CRD at the top goes last
        manifest = document.manifest
        kinds = await discover(client, manifest["apiVersion"])
        resource = next((r for r in kinds if r.kind == manifest["kind"]), None)
        if resource is None:
            raise LocalError(f"{document.where}: no kind {manifest['kind']!r} in {manifest['apiVersion']}")
        targets.append((resource, manifest["metadata"]["name"], manifest["metadata"].get("namespace") or namespace))
    return targets


async def _one(client: ApiClient, resource: Resource, name: str, namespace: str, *, tolerant: bool) -> None:
    try:
        await client.delete(resource, name, namespace)
    except ApiError as error:
        if not (error.not_found and tolerant):
            raise
        click.echo(f"{resource.plural}/{name} not found")
        return
    click.echo(f"{resource.plural}/{name} deleted")


async def _gone(client: ApiClient, resource: Resource, name: str, namespace: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            left = await client.get(resource, name, namespace)
        except ApiError as error:
            if error.not_found:
                return
            raise
        if time.monotonic() > deadline:
            why = ", ".join(left["metadata"].get("finalizers") or ()) or "its processes haven't ended"
            raise LocalError(f"{resource.plural}/{name} is still there after {_TIMEOUT_S:g} s: {why}")
        await asyncio.sleep(_POLL_S)
