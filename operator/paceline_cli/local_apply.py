"""`paceline local apply -f`: server-side apply of a file of manifests, all of it or none of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from paceline_cli.local_common import home_option, namespace_option, with_client
from paceline_cli.local_kinds import discover
from paceline_local.errors import ApiError, LocalError
from paceline_local.json_yaml import JsonLoader, NotJson, load_json_yaml
from paceline_local.resources import Resource
from paceline_local.state import StateDir

if TYPE_CHECKING:
    from paceline_local.client import ApiClient

__all__ = ["Document", "apply", "parse_manifests", "pruned", "read_manifests"]

_MANAGER = "paceline-local"
_REQUIRED = ("apiVersion", "kind", "metadata")


@dataclass(frozen=True, slots=True)
class Document:
    """One manifest of a file; `where` names it in messages."""

    where: str
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """`kind.group/name`, as kubectl prints it."""
        group = self.manifest["apiVersion"].rpartition("/")[0]
        kind = self.manifest["kind"].lower() + (f".{group}" if group else "")
        return f"{kind}/{self.manifest['metadata']['name']}"


@click.command()
@click.option("-f", "--filename", required=True, metavar="FILE", help="YAML or JSON, several documents allowed; - is stdin.")
@click.option("--force-conflicts", is_flag=True, help="Take over fields that somebody else manages.")
@click.option("--dry-run", is_flag=True, help="Only check.")
@namespace_option
@home_option
def apply(filename: str, force_conflicts: bool, dry_run: bool, namespace: str, state: StateDir) -> None:
    """Apply manifests. All of them are checked by the server before any is applied."""
    source, text = read_manifests(filename)
    documents = parse_manifests(text, source)
    with_client(state, lambda client: _apply_all(client, documents, namespace, force=force_conflicts, dry_run=dry_run))


def read_manifests(filename: str) -> tuple[str, str]:
    """Return what to call the source, and its text. Raises `LocalError` if it can't be read."""
    if filename == "-":
        return "stdin", sys.stdin.read()
    try:
        return filename, Path(filename).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise LocalError(f"{filename} can't be read: {reason}") from error


def parse_manifests(text: str, source: str) -> list[Document]:
    """Return the manifests of a YAML text. Raises `LocalError` that names the file, the document and the line or field."""
    try:
        loaded = list(load_json_yaml(text, _StrictLoader))
    except NotJson as error:
        raise LocalError(f"{source}: not a manifest: {error}") from error
    except yaml.YAMLError as error:
        raise LocalError(f"{source}{_line(error)}: not YAML: {getattr(error, 'problem', None) or error}") from error
    documents = []
    for number, found in enumerate((d for d in loaded if d is not None), start=1):
        where = f"{source}, document {number}"
        items = found.get("items") if isinstance(found, dict) and found.get("kind") == "List" else [found]
        documents += [Document(where, _checked(item, where)) for item in items or ()]
    if not documents:
        raise LocalError(f"{source} has no manifests")
    return documents


class _StrictLoader(JsonLoader):
    """Refuses a key that is there twice: plain YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is there twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _checked(manifest: Any, where: str) -> dict[str, Any]:
    if not isinstance(manifest, dict):
        raise LocalError(f"{where}: not a manifest but {type(manifest).__name__}: write apiVersion, kind, metadata and spec")
    missing = [field for field in _REQUIRED if not manifest.get(field)]
    if missing:
        raise LocalError(f"{where}: {missing[0]} is missing")
    wrong = [field for field in ("apiVersion", "kind") if not isinstance(manifest[field], str)]
    if wrong:
        raise LocalError(f"{where}: {wrong[0]} isn't text")
    metadata = manifest["metadata"]
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str) or not metadata["name"]:
        raise LocalError(f"{where}: metadata.name is missing or isn't text")
    return manifest


async def _apply_all(client: ApiClient, documents: list[Document], namespace: str, *, force: bool, dry_run: bool) -> None:
    resources = _Resources(client, documents)
    later = [d for d in documents if await resources.depends_on_file(d)]
    for document in documents:
        if document not in later:  # what a document of this file makes possible can't be checked before that one is applied
            await _send(client, await resources.of(document), document, namespace, force=force, dry_run=True)
    for document in documents if not dry_run else ():
        before = await _existing(client, await resources.of(document), document, namespace)
        after = await _send(client, await resources.of(document), document, namespace, force=force, dry_run=False)
        click.echo(f"{document.name} {_verb(before, after)}")
    if dry_run:
        click.echo(f"{len(documents) - len(later)} manifests are fine")


async def _existing(client: ApiClient, resource: Resource, document: Document, namespace: str) -> dict[str, Any] | None:
    try:
        return await client.get(resource, document.manifest["metadata"]["name"], _namespace(document, namespace))
    except ApiError as error:
        if error.not_found:
            return None
        raise


def _verb(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    if before is None:
        return "created"
    same = before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    return "unchanged" if same else "configured"


def _namespace(document: Document, default: str) -> str:
    return str(document.manifest["metadata"].get("namespace") or default)


async def _send(
    client: ApiClient, resource: Resource, document: Document, namespace: str, *, force: bool, dry_run: bool
) -> dict[str, Any]:
    from paceline_local.client import APPLY

    metadata = document.manifest["metadata"] | (
        {"namespace": _namespace(document, namespace)} if resource.namespaced else {}
    )
    manifest = document.manifest | {"metadata": metadata}
    params = {"fieldManager": _MANAGER, "force": "true" if force else "false", "fieldValidation": "Strict"}
    params |= {"dryRun": "All"} if dry_run else {}
    try:
        answer = await client.patch(
            resource, metadata["name"], manifest, metadata.get("namespace"), content=APPLY, params=params
        )
    except ApiError as error:
        hint = " (--force-conflicts takes the fields over)" if error.conflict else ""
        raise LocalError(f"{document.where}: {document.name}: {error}{hint}") from error
    unknown = pruned(manifest, answer)
    if unknown:  # older servers drop unknown fields of custom resources without a word
        raise LocalError(f"{document.where}: {document.name}: unknown field {unknown[0]!r}: check its spelling and place")
    return answer


def pruned(sent: Any, answered: Any, path: str = "") -> list[str]:
    """Return the paths of fields that were sent and aren't in the answer: the server dropped them as unknown."""
    if isinstance(sent, dict) and isinstance(answered, dict):
        found = []
        for key, value in sent.items():
            here = f"{path}.{key}" if path else str(key)
            if key not in answered:
                found += [] if value in (None, {}, [], "") or path == "metadata" else [here]
            else:
                found += pruned(value, answered[key], here)
        return found
    if isinstance(sent, list) and isinstance(answered, list) and len(sent) == len(answered):
        return [f for i, (s, a) in enumerate(zip(sent, answered, strict=True)) for f in pruned(s, a, f"{path}[{i}]")]
    return []


class _Resources:
    """Finds where a manifest's kind lives, by the server's discovery."""

    def __init__(self, client: ApiClient, documents: list[Document]) -> None:
        self._client = client
        self._known: dict[tuple[str, str], Resource] = {}
        crds = [d.manifest.get("spec") or {} for d in documents if d.manifest["kind"] == "CustomResourceDefinition"]
        self._coming = {((spec.get("names") or {}).get("kind"), spec.get("group")) for spec in crds}
        self._namespaces = {d.manifest["metadata"]["name"] for d in documents if d.manifest["kind"] == "Namespace"}

    async def depends_on_file(self, document: Document) -> bool:
        """Whether the document's namespace or kind comes with the same file and isn't there yet."""
        from paceline_local.resources import NAMESPACES

        group = document.manifest["apiVersion"].rpartition("/")[0]
        if (document.manifest["kind"], group) in self._coming:
            return True
        namespace = document.manifest["metadata"].get("namespace")
        if namespace not in self._namespaces:
            return False
        try:
            await self._client.get(NAMESPACES, namespace)
        except ApiError as error:
            if error.not_found:
                return True
            raise
        return False

    async def of(self, document: Document) -> Resource:
        """Return the resource of a document. Raises `LocalError` for a kind that the server doesn't have."""
        version, kind = document.manifest["apiVersion"], document.manifest["kind"]
        if (version, kind) not in self._known:
            for resource in await discover(self._client, version):
                self._known[version, resource.kind] = resource
        if (version, kind) not in self._known:
            raise LocalError(f"{document.where}: no kind {kind!r} in {version}: check apiVersion and kind")
        return self._known[version, kind]
