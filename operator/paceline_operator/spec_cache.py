"""The part of a spec that is about where a model's files are kept between pods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline_operator.errors import Problem
from paceline_operator.fields import item
from paceline_operator.kinds import Boolean, Quantity, Text

__all__ = ["Cache", "cache_problems"]

_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Where downloaded models are kept: a claim, a claim that the operator makes (`size`), or a folder of each node."""

    claim: str | None = item(Text(pattern=_NAME, example="models"), "PersistentVolumeClaim that exists, shared by all pods.")
    size: str | None = item(Quantity(), "Makes a claim of this size; it goes with the service or with this field.")
    storage_class: str | None = item(
        Text(pattern=_NAME, example="nfs"), "Storage class of that claim. Default: the cluster's."
    )
    access_mode: str = item(
        Text(choices=("ReadWriteMany", "ReadWriteOnce")),
        "Of that claim; ReadWriteOnce keeps all pods on one node. Default ReadWriteMany.",
        default="ReadWriteMany",
    )
    node_path: str | None = item(
        Text(1024, r"^/[!-~]+$", example="/var/lib/paceline/models"),
        "Folder of each node, shared by its pods, if the class allows it; it has to belong to user 10001.",
    )
    preload: bool = item(
        Boolean(),
        "Whether a Job fetches an hf:// model into the claim before any pod starts. Default false: pods fetch it.",
        default=False,
    )
    checksum: str | None = item(
        Text(71, r"^sha256:[0-9a-f]{64}$", example="sha256:" + 64 * "0"),
        "What `paceline-runtime --fetch-only` prints for the model; another one fails the Job. Needs preload.",
    )


def cache_problems(cache: Cache | None, uri: str) -> Iterator[Problem]:
    """Yield what is wrong between the fields of `cache`, and with a model that needs none."""
    if cache is None:
        return
    path = "spec.cache"
    given = [name for name, value in (("claim", cache.claim), ("size", cache.size), ("nodePath", cache.node_path)) if value]
    if len(given) != 1:
        shown = ", ".join(given) or "none of them"
        yield Problem(path, shown, "exactly one of claim, size and nodePath", "say where models are kept, once")
    if cache.preload and cache.node_path:
        remedy = "use claim or size, or leave preload out: a Job fills one node only"
        yield Problem(f"{path}.preload", True, "not with nodePath", remedy)
    if not uri.startswith("hf://"):
        yield Problem(path, uri, "for hf:// models", "remove it: the other schemes download nothing")
    if cache.checksum and not cache.preload:
        yield Problem(f"{path}.checksum", cache.checksum, "only with preload", "set preload: true")
