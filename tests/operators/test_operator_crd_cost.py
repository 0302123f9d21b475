"""The CEL rules of the CRDs are cheap by construction: an API server refuses a CRD whose rules might cost too much.

Kubernetes estimates the worst case out of `maxLength`, `maxItems` and `maxProperties`; without them it assumes what fits
in a request. Bounds: 10 million per rule and 100 million per CRD (apiextensions-apiserver, `validation.go`).
"""

import re

import pytest

from paceline_operator.crd import class_crd, crd

PER_RULE, PER_CRD = 10_000_000, 100_000_000
LOOPS = re.compile(r"\.(all|exists|exists_one|map|filter|matches|contains|split|replace|indexOf|find|findAll)\(")
STEP = 10  # more than any operator or field access is counted as
BOUNDS = {"string": "maxLength", "array": "maxItems"}


def rules(schema, path="", times=1):
    """Yield (path, schema, rule, how often it may be run for one object); infinite if nothing bounds a list or a map."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield path, schema, rule["rule"], times
    for name, inner in schema.get("properties", {}).items():
        yield from rules(inner, f"{path}.{name}", times)
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]", times * schema.get("maxItems", float("inf")))
    if isinstance(schema.get("additionalProperties"), dict):
        inner = schema["additionalProperties"]
        yield from rules(inner, f"{path}{{}}", times * schema.get("maxProperties", float("inf")))


def cost(schema, rule, times):
    """Return more than the server's estimate: each token once, with the whole text that it may read."""
    return (len(re.findall(r"\w+|[^\w\s]", rule)) * STEP * (1 + schema.get("maxLength", 0))) * times


@pytest.fixture(params=[crd, class_crd], ids=["InferenceService", "InferenceClass"])
def found(request):
    root = request.param()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return list(rules(root))


def test_what_a_rule_reads_is_bounded(found):
    assert found
    for path, schema, rule, times in found:
        assert times < float("inf"), f"{path}: a list or map around it has no bound"
        assert schema["type"] not in BOUNDS or BOUNDS[schema["type"]] in schema, path
        assert not LOOPS.search(rule), f"{path}: bound what it goes through, and estimate it here: {rule}"


def test_an_object_rule_reads_numbers_only(found):
    """`self.a.b` would reach texts that the bound of `self` says nothing about."""
    for path, schema, rule, _ in found:
        if schema["type"] == "object":
            named = set(re.findall(r"self\.(\w+)", rule))
            compared = set(re.findall(r"self\.(\w+) [<>]=?|[<>]=? self\.(\w+)", rule))
            for name in named & {name for pair in compared for name in pair if name}:
                assert schema["properties"][name]["type"] in ("integer", "number"), f"{path}.{name}"
            assert not re.search(r"self\.\w+\.", rule), path


def test_the_worst_case_is_far_below_the_servers_budget(found):
    costs = [cost(schema, rule, times) for _, schema, rule, times in found]
    assert max(costs) < PER_RULE / 10
    assert sum(costs) < PER_CRD / 10
