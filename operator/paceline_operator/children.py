"""What all children have in common: names, labels, owner, and the hash by which a change is seen. Pure."""

from __future__ import annotations

from typing import Any

from paceline_operator.names import APPLIED, GROUP, KIND, VERSION, base_name, digest, labels
from paceline_operator.spec import InferenceService

__all__ = ["Manifest", "child_of", "owner_reference", "stamped"]

Manifest = dict[str, Any]


def owner_reference(service: InferenceService) -> Manifest:
    """Return the reference by which the cluster deletes a child together with its service."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": False,  # true would need the right to set finalizers on the service
    }


def child_of(service: InferenceService, version: str, kind: str, content: Manifest, name: str = "") -> Manifest:
    """Return a child called `name` (default: like the service), with our labels and owner, and `content` beside them."""
    metadata = {
        "name": name or base_name(service.name),
        "namespace": service.namespace,
        "labels": labels(service.name),
        "ownerReferences": [owner_reference(service)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata} | content


def stamped(child: Manifest, annotations: Manifest | None = None) -> Manifest:
    """Return a child with its own hash: one whose stamp differs is out of date even if all our fields are there."""
    annotated = {**(annotations or {}), APPLIED: digest(child)}
    return child | {"metadata": child["metadata"] | {"annotations": annotated}}
