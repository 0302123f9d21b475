"""The CRD and the parser come from one definition: what one takes the other takes, but for rules that a schema can't say."""

import copy
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_kit import FULL, MINIMAL, set_at

from paceline_core.knobs import KNOBS
from paceline_operator import reference
from paceline_operator.crd import class_crd, crd, crds, main, render
from paceline_operator.kinds_knob import KnobKind
from paceline_operator.spec import BATCHING, SPEC

ROOT = Path(__file__).parents[2]


def root_of(definition):
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


SCHEMA = root_of(crd())
CLASS_SCHEMA = root_of(class_crd())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA["properties"]["spec"])
JUNK = [
    None, True, False, 0, -1, 1, 2**70, 0.5, -0.5, 1.5, "", "x", " ", "0", "5", "5ms", "never", "a b", "ü", "a" * 5000,
    "hf://a/b", "Off", "static", [], [1], [0], ["x"], [1] * 70, {}, {"a": 1}, {"a": "b"}, {"a": None},
]  # fmt: skip


def parser_takes(spec):
    problems = []
    SPEC.parse(spec, "spec", problems)
    return not problems


def schema_takes(spec):
    return VALIDATOR.is_valid(spec)


def leaves(value, path=""):
    """Every path in a document that holds a value, inner ones included."""
    if path:
        yield path
    if isinstance(value, dict) and not path.startswith(("template", "env.1.valueFrom")):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}")


def schema_at(path):
    found = SCHEMA["properties"]["spec"]
    for part in path.split("."):
        found = found["items"] if part.isdigit() else found.get("properties", {}).get(part) or found["additionalProperties"]
    return found


def test_the_samples_are_fine_on_both_sides():
    for spec in (FULL, MINIMAL):
        assert parser_takes(spec)
        assert schema_takes(spec)


@pytest.mark.parametrize("path", sorted(leaves(FULL)))
def test_schema_and_parser_agree_about_every_field(path):
    """All junk values in every place; they may differ only where the schema carries a CEL rule, and then one way only."""
    for value in JUNK:
        spec = set_at(FULL, path, value)
        schema, parser = schema_takes(spec), parser_takes(spec)
        assert not (parser and not schema), f"{path}={value!r}: the parser takes what the schema refuses"
        if schema and not parser:
            here = schema_at(path)
            preserved = isinstance(value, dict) and here.get("x-kubernetes-preserve-unknown-fields")
            ruled = "x-kubernetes-validations" in here
            assert preserved or ruled, f"{path}={value!r}: only the parser refuses it"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**20) | st.floats(-2, 2) | st.text(max_size=5) | st.sampled_from(JUNK),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(sorted(leaves(FULL))), json_values), max_size=4))
def test_what_the_parser_takes_the_schema_takes(changes):
    spec = copy.deepcopy(FULL)
    for path, value in changes:
        try:
            spec = set_at(spec, path, value)
        except (AttributeError, IndexError, KeyError, TypeError):
            continue  # an earlier change took the place away
    if any(isinstance(v, float) and v.is_integer() for _, v in changes):
        return  # JSON Schema calls 1.0 an integer; YAML and JSON from a client give 1
    if parser_takes(spec):
        VALIDATOR.validate(spec)


def test_every_knob_is_a_field():
    fields = set(BATCHING.fields) | {"sloTtft", "sloTpot"}
    assert fields == {knob.name for knob in KNOBS}
    slo = SCHEMA["properties"]["spec"]["properties"]["slo"]["properties"]
    assert set(slo) == {"ttft", "tpot", "preset", "percentile"}
    assert all(isinstance(item.kind, KnobKind) for item in BATCHING.fields.values())


def walk(schema, path=""):
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from walk(schema[name], f"{path}.{name}")


@pytest.mark.parametrize("root", [SCHEMA, CLASS_SCHEMA], ids=["service", "class"])
def test_the_schema_is_structural(root):
    for path, schema in walk(root):
        typed = "type" in schema or schema.get("x-kubernetes-int-or-string")
        assert typed or schema.get("x-kubernetes-preserve-unknown-fields"), path
        # a boolean exclusiveMinimum means one thing in OpenAPI 3.0 and is an error in JSON Schema
        assert not {"exclusiveMinimum", "exclusiveMaximum", "$ref", "allOf", "not"} & set(schema), path


def test_every_field_of_the_spec_is_described():
    for path, schema in (*walk(SCHEMA["properties"]["spec"]), *walk(CLASS_SCHEMA["properties"]["spec"])):
        last = path.rpartition(".")[2]
        if last not in ("items", "additionalProperties", "min", "max"):
            assert schema.get("description"), path


def test_only_replicas_has_a_default():
    """A default on anything else would hide from a platform team's class that the user left the field out."""
    assert [path for path, schema in walk(SCHEMA) if "default" in schema] == [".spec.replicas"]
    assert [path for path, schema in walk(CLASS_SCHEMA) if "default" in schema] == []


def test_patterns_work_in_the_servers_engine():
    """Go's RE2 has no look-around, no back references and no Unicode \\d: patterns may use neither."""
    for path, schema in (*walk(SCHEMA), *walk(CLASS_SCHEMA)):
        pattern = schema.get("pattern", "")
        assert not re.search(r"\(\?[=!<]|\\[dswDSW1-9]", pattern), path
        assert not pattern or (pattern.startswith("^") and pattern.endswith("$")), path


def test_status_and_scale_are_subresources():
    version = crd()["spec"]["versions"][0]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    assert "status" in version["subresources"]
    assert [column["name"] for column in version["additionalPrinterColumns"]][:2] == ["Strategy", "Ready"]
    assert crd()["spec"]["names"]["shortNames"] == ["infsvc"]


def test_the_files_in_the_repository_are_what_the_code_says():
    assert main(["--check", str(ROOT / "crds"), str(ROOT / "charts" / "paceline" / "files" / "crds")]) == 0


def test_the_references_in_the_repository_are_what_the_code_says(tmp_path, capsys):
    assert reference.main(["--check", str(ROOT / "docs")]) == 0
    assert reference.main([str(tmp_path)]) == 0
    (tmp_path / "inferenceclass.md").write_text("old")
    assert reference.main(["--check", str(tmp_path)]) == 1
    assert "make crds" in capsys.readouterr().err


def test_the_reference_has_every_field_with_its_bounds():
    pages = reference.references()
    for found, text in zip(crds(), (pages["inferenceservice.md"], pages["inferenceclass.md"]), strict=True):
        for path, _ in walk(root_of(found)["properties"]["spec"]):
            name = path.rpartition(".")[2]
            if name not in ("", "items", "additionalProperties"):
                assert f".{name}` |" in text or f"`{name}` |" in text, path
    text = pages["inferenceservice.md"]
    assert "| `batching.strategy` | static \\| dynamic \\| continuous \\| iteration |" in text
    assert "| `batching.maxNumSeqs` | integer, 1 to 65536 |" in text
    assert "| `slo.ttft` | string, 0ms &lt; value ≤ 1h |" in text
    assert "| `env[].name` | string | Name. **Required.** |" in text
    assert "maxNumBatchedTokens must not be below maxNumSeqs" in text
    for spec in KNOBS:
        assert f"| `{spec.name}` | " in pages["knobs.md"]


def test_check_tells_how_to_mend_a_stale_file(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    file = tmp_path / "inferenceservices.paceline.io.yaml"
    assert yaml.safe_load(file.read_text()) == crd()
    file.write_text(render(crd()).replace("maxNumSeqs", "slots"))
    assert main(["--check", str(tmp_path)]) == 1
    assert "make crds" in capsys.readouterr().err
    assert main(["--check", str(tmp_path / "nowhere")]) == 1
