"""YAML as Kubernetes reads it: another way to write JSON, so with JSON's types only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

__all__ = ["JsonLoader", "NotJson", "as_json", "load_json_yaml"]

_MAX_DEPTH = 100  # a PodTemplate in a CustomResourceDefinition's schema is some 40 deep
_MAX_VALUES = 200_000  # what an API server takes, 3 MB, holds fewer; aliases of aliases make billions of a few lines
_PREFIX = "tag:yaml.org,2002:"


def _foreign(_loader: JsonLoader, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, f"JSON has no {node.tag.removeprefix(_PREFIX)}", node.start_mark)


class NotJson(ValueError):
    """A YAML document that no JSON text can say."""


class JsonLoader(yaml.SafeLoader):
    """What looks like a time stays text, keys become text; binary data, sets and the like are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        key = self.construct_object(node, deep=True)
        if isinstance(key, str):
            return key
        if key is None or isinstance(key, bool | int | float):
            return json.dumps(key)  # as kubectl does: `1: a` is `"1": "a"`
        raise yaml.constructor.ConstructorError(None, None, "a key must be text", node.start_mark)


JsonLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_PREFIX}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name in ("binary", "omap", "pairs", "set", "timestamp"):
    JsonLoader.add_constructor(_PREFIX + _name, _foreign)


def load_json_yaml(text: str, loader: type[JsonLoader] = JsonLoader) -> Iterator[Any]:
    """Yield the documents of a text. Raises `NotJson` or `yaml.YAMLError`."""
    try:
        for document in yaml.load_all(text, Loader=loader):
            yield as_json(document)
    except RecursionError:
        raise NotJson(f"nested deeper than {_MAX_DEPTH} levels") from None


def as_json(document: Any) -> Any:
    """Return a document with its aliases written out. Raises `NotJson` for what can't be written as JSON."""
    left = _MAX_VALUES

    def convert(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise NotJson(f"more than {_MAX_VALUES} values, aliases counted each time")
        if depth > _MAX_DEPTH:
            raise NotJson(f"nested deeper than {_MAX_DEPTH} levels, or contains itself")
        if isinstance(value, dict):
            return {key: convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item, depth + 1) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            raise NotJson(f"{value} is no number in JSON")
        return value

    return convert(document, 0)
