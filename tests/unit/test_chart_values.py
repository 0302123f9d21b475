"""values.yaml, values.schema.json and the templates agree: no value is unknown, unused, or open to typos."""

import json
import re

import pytest
import yaml
from chart_kit import CHART, FULL_VALUES, IMAGES, rendered

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
FULL = yaml.safe_load(FULL_VALUES.read_text())
# what decides only together with another value
NEEDS = {
    "metrics.service": [],
    "metrics.serviceMonitor.enabled": [],
    "podDisruptionBudget.enabled": ["replicas=2"],
}
# open maps: their entries are the user's, so `grafana_dashboard` isn't a value of ours
OPEN = {"metrics.dashboards.labels", "resources"}
# the digest hides the tag; how certificates come decides what is made, and is tested in test_chart.py
UNSEEN = {"image.tag", "imageRegistry", "webhook.certificates"}


def leaves(node, path=""):
    if isinstance(node, dict) and node and path not in OPEN:
        for name, child in node.items():
            yield from leaves(child, f"{path}.{name}".lstrip("."))
    else:
        yield path, node


def at(node, path):
    for name in path.split("."):
        node = node[name]
    return node


def schema_at(path):
    node = SCHEMA
    for name in path.split("."):
        node = node["properties"][name]
        if "$ref" in node:
            node = SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[1]]
    return node


def schema_leaves(node, path=""):
    if "$ref" in node:
        node = SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[1]]
    for name, child in node.get("properties", {}).items():
        yield from schema_leaves(child, f"{path}.{name}".lstrip("."))
    if "properties" not in node:
        yield path


LEAVES = dict(leaves(VALUES))
SWITCHES = sorted(path for path, value in LEAVES.items() if isinstance(value, bool))


def test_every_value_is_in_the_schema_and_the_other_way_round():
    # Helm itself gives every chart `global`
    assert set(schema_leaves(SCHEMA)) == set(LEAVES) | {"global"}


def test_the_schema_is_closed_at_every_depth():
    for path in {path.rpartition(".")[0] for path in LEAVES if "." in path}:
        assert schema_at(path)["additionalProperties"] is False, path
    assert SCHEMA["additionalProperties"] is False


def test_templates_use_only_values_that_exist():
    used = re.findall(r"\.Values((?:\.\w+)+)", TEMPLATES)
    used += [".metrics" + rest for rest in re.findall(r"\$metrics((?:\.\w+)+)", TEMPLATES)]
    assert len(used) > len(LEAVES) // 2
    for path in {use.lstrip(".") for use in used}:
        at(VALUES, path)


def test_the_full_values_state_every_value_and_change_it():
    for path, default in LEAVES.items():
        given = at(FULL, path)
        assert given is True if isinstance(default, bool) else given != default, path


def words(node):
    if isinstance(node, dict):
        for name, child in node.items():
            yield str(name)
            yield from words(child)
    elif isinstance(node, list):
        for child in node:
            yield from words(child)
    elif node != "" and not isinstance(node, bool):
        yield str(node)


def test_every_value_reaches_the_manifests():
    text = rendered(*IMAGES, "-f", str(FULL_VALUES))
    for path in set(LEAVES) - UNSEEN:
        for word in words(at(FULL, path)):
            assert word in text, f"{path}: {word} isn't in what the chart makes"


@pytest.mark.parametrize("path", SWITCHES)
def test_every_switch_switches_something(path):
    options = [option for value in NEEDS.get(path, []) for option in ("--set", value)]
    base = rendered(*IMAGES, "--set", "operatorKey.existingSecret=given", *options)
    flipped = str(not LEAVES[path]).lower()
    assert rendered(*IMAGES, "--set", "operatorKey.existingSecret=given", *options, "--set", f"{path}={flipped}") != base
