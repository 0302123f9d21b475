"""Kinds as people type them (`pods`, `po`, `Deployment`, `infsvc`), found in the API server's discovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_local.errors import ApiError, LocalError
from paceline_local.resources import Resource

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["discover", "find_kind"]

_PREFERRED = ("", "apps", "paceline.io")  # of several groups with one kind, people mean these


async def discover(client: ApiClient, api_version: str) -> list[Resource]:
    """Return the kinds of one group and version, none if the server doesn't have it."""
    return [resource for resource, _ in await _entries(client, api_version)]


async def _entries(client: ApiClient, api_version: str) -> list[tuple[Resource, set[str]]]:
    """Return each kind with the lower-case words that mean it."""
    group, _, version = api_version.rpartition("/")
    try:
        answer = await client.request("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
    except ApiError as error:
        if error.not_found:
            return []
        raise
    found = []
    for entry in answer.get("resources") or ():
        if "/" not in entry["name"]:
            resource = Resource(group, version, entry["name"], entry["kind"], entry["namespaced"])
            found.append((resource, _words(entry, group)))
    return found


def _words(entry: dict[str, Any], group: str) -> set[str]:
    words = {entry["name"], entry["kind"].lower(), entry.get("singularName") or "", *(entry.get("shortNames") or ())}
    return {word.lower() for word in words if word} | {f"{entry['name']}.{group}"}


async def find_kind(client: ApiClient, word: str) -> Resource:
    """Return the kind that a word means. Raises `LocalError` if the server has none."""
    groups = (await client.request("GET", "/apis")).get("groups") or ()
    versions = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
    found = [
        resource for version in versions for resource, words in await _entries(client, version) if word.lower() in words
    ]
    if not found:
        raise LocalError(
            f"no kind {word!r}: try infsvc, pods, deployments, services, configmaps or events; one object is infsvc/NAME"
        )
    return min(found, key=lambda r: _PREFERRED.index(r.group) if r.group in _PREFERRED else len(_PREFERRED))
