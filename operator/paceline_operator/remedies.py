"""Why a pod doesn't run, in words that say what to do: from what scheduler, kubelet and runtime leave behind. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from paceline_operator.policy import PRODUCT_LABELS

__all__ = ["last_line", "no_node", "out_of_memory", "short", "start_failure"]

_LONGEST = 700  # characters of a message that fit a table and an event
_PLAN = re.compile(r"KV pool: .*", re.MULTILINE)  # the runtime's own arithmetic, in its log
# the runtime's last `error:` line → reason in one word, what to do
_START_FAILURES = (
    (
        re.compile(r"gated|licen[cs]e|awaiting (a )?review|\b40[13]\b|[Uu]nauthori[sz]ed|[Ff]orbidden"),
        "ModelGated",
        "accept the model's licence where it is published, and name a token that may read it in spec.model.secretRef",
    ),
    (
        re.compile(
            r"not found|doesn't exist|isn't installed|holds (neither|no file)|No such file|has no revision"
            r"|knows no such repository|isn't in the cache"
        ),
        "ModelNotFound",
        "correct spec.model.uri or spec.model.revision (a private one needs spec.model.secretRef), or put the files there",
    ),
    (
        re.compile(r"can't be fetched|resolve|timed out|[Cc]onnection|No route|Max retries"),
        "ModelDownload",
        "see that pods reach the model's host (proxy, mirror in HF_ENDPOINT, network policy), or serve it from a pvc://",
    ),
    (
        re.compile(r"no memory for|memory for (the )?weights|out of memory", re.IGNORECASE),
        "OutOfMemory",
        "raise spec.resources.limits.memory or take a larger accelerator, or lower model.maxModelLen",
    ),
)


def short(text: str) -> str:
    """Return a text in one line that isn't too long."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def last_line(text: str) -> str:
    """Return the line that says why: the last `error:` line, else the last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return short((errors or lines or ["it left no message"])[-1])


def start_failure(line: str) -> tuple[str, str]:
    """Return a reason in one word for a runtime that couldn't start, and its last line with what to do about it."""
    for pattern, reason, remedy in _START_FAILURES:
        if pattern.search(line):
            return reason, f"{line}: {remedy}"
    return "StartFailed", line


def out_of_memory(pod: Mapping[str, Any], container: str, log: str) -> str:
    """Return what a container was killed for that used more memory than its limit, with the bytes."""
    text = _limit(pod, container)
    planned = _PLAN.search(log)
    plan = f"; the runtime had planned: {planned[0]}" if planned else "; it was killed before it had planned its KV cache"
    remedy = "raise spec.resources.limits.memory, or lower batching.kvMemoryFraction or model.maxModelLen"
    return short(f"killed at its memory limit of {text}{plan}: {remedy}")


def no_node(pod: Mapping[str, Any], message: str) -> str:
    """Return why no node takes a pod and what would help, before the scheduler's own words."""
    hints = "; ".join(_hints(pod, message))
    return short(f"{hints} ({message})" if hints else message)


def _hints(pod: Mapping[str, Any], message: str) -> Iterator[str]:
    selector = (pod.get("spec") or {}).get("nodeSelector") or {}
    for resource in re.findall(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)", message):
        amount = _requested(pod, resource)
        if "/" in resource:
            product = selector.get(PRODUCT_LABELS.get(resource.partition("/")[0], ""), "")
            of = f" of product {product}" if product else ""
            yield f"no node has {amount} free {resource}{of}: free some, add a node, or lower spec.accelerator.count"
        else:
            yield f"no node has {amount} of {resource} free: lower spec.resources.requests.{resource}, or add a node"
    if "node selector" in message or "node affinity" in message:
        wanted = ", ".join(f"{key}={value}" for key, value in sorted(selector.items())) or "what its affinity asks for"
        yield f"no fitting node is labelled {wanted}: see spec.accelerator.product and spec.nodeSelector"
    if "taint" in message:
        yield "nodes are tainted: tolerate the taint in spec.tolerations, or add a node without it"
    if "persistentvolumeclaim" in message.lower():
        yield "its volume claim isn't there or isn't bound: see 'kubectl get pvc'"


def _requested(pod: Mapping[str, Any], resource: str) -> str:
    """Return the most that a container of the pod asks for."""
    requests = [(c.get("resources") or {}).get("requests") or {} for c in pod["spec"]["containers"]]
    return next((str(request[resource]) for request in requests if resource in request), "enough")


def _limit(pod: Mapping[str, Any], name: str) -> str:
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    limit = ((containers.get(name, {}).get("resources") or {}).get("limits") or {}).get("memory")
    if limit is None:
        return "the node"
    return f"{limit} ({int(parse_quantity(limit))} bytes)"  # type: ignore[no-untyped-call]
