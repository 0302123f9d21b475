"""Label and field selectors: text in, a predicate on objects out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline_local.apiserver.errors import bad_request
from paceline_local.apiserver.objects import Json, dig, metadata

__all__ = ["Predicate", "parse_fields", "parse_labels", "selector"]

Predicate = Callable[[Json], bool]

_COMMON_FIELDS = ("metadata.name", "metadata.namespace")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "Pod": ("spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "status.phase", "status.podIP"),
    "Event": (
        *(f"involvedObject.{f}" for f in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")),
        *("reason", "reportingComponent", "source", "type"),
    ),
    "Namespace": ("status.phase",),
    "Secret": ("type",),
    "Node": ("spec.unschedulable",),
    "ReplicaSet": ("status.replicas",),
}
_TERM = re.compile(
    r"\s*(?:(?P<not>!)\s*(?P<absent>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=|>|<)\s*(?P<value>[\w.-]*)|\s(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|$)"
)


def selector(kind: str, labels: str, fields: str) -> Predicate:
    """Return the conjunction of both selectors; raises a 400 `ApiError` for a text that doesn't parse."""
    tests = [*parse_labels(labels), *parse_fields(kind, fields)]
    return lambda obj: all(test(obj) for test in tests)


def parse_labels(text: str) -> list[Predicate]:
    """Return the tests of a label selector (equality and set based)."""
    tests, at = [], 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise bad_request(f"unable to parse requirement: found {text[at:]!r} in label selector {text!r}")
        tests.append(_label_test(match))
        at = match.end()
    return tests


def _label_test(match: re.Match[str]) -> Predicate:
    if match["not"]:
        return _on_label(match["absent"], lambda value: value is None)
    key, operator = match["key"], match["op"] or match["set"]
    if operator is None:
        return _on_label(key, lambda value: value is not None)
    if operator in ("<", ">"):
        return _on_label(key, _compare(operator, match["value"]))
    wanted = {v.strip() for v in match["values"].split(",")} if match["set"] else {match["value"]}
    if operator in ("!=", "notin"):
        return _on_label(key, lambda value: value not in wanted)
    return _on_label(key, lambda value: value in wanted)


def _on_label(key: str, accept: Callable[[str | None], bool]) -> Predicate:
    return lambda obj: accept((metadata(obj).get("labels") or {}).get(key))


def _compare(operator: str, bound: str) -> Callable[[str | None], bool]:
    if not bound.isdigit():
        raise bad_request(f"for {operator!r} operator, the value must be an integer")
    sign = 1 if operator == ">" else -1
    return lambda value: value is not None and value.isdigit() and sign * (int(value) - int(bound)) > 0


def parse_fields(kind: str, text: str) -> list[Predicate]:
    """Return the tests of a field selector; only the fields that Kubernetes supports for `kind`."""
    return [_field_test(kind, term) for term in text.split(",") if term]


def _field_test(kind: str, term: str) -> Predicate:
    match = re.fullmatch(r"([\w.]+)\s*(==|=|!=)(.*)", term)
    if match is None:
        raise bad_request(f"invalid selector: {term!r}; can't understand {term!r}")
    path, operator, wanted = match.groups()
    if path not in (*_COMMON_FIELDS, *_FIELDS.get(kind, ())):
        raise bad_request(f"field label not supported: {path}")
    keys = ("source", "component") if path == "source" else tuple(path.split("."))
    return lambda obj: (_text(dig(obj, keys)) == wanted) == (operator != "!=")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
