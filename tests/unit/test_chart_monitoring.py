"""Dashboards and alerts speak of metrics that the code exports, and every alert and reason has its runbook."""

import ast
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from chart_kit import CHART, render

from paceline_operator.knob_sync import KnobState
from paceline_operator.metrics import Metrics
from paceline_operator.remedies import _START_FAILURES
from paceline_operator.tuning.metrics import TunerMetrics
from paceline_operator.tuning.state import Phase, Reason
from paceline_runtime.metrics import RuntimeMetrics

ROOT = CHART.parents[1]
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted((CHART / "files" / "dashboards").glob("*.json"))}
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
METRIC = re.compile(r"\b(?:paceline_|vllm:)\w+")


def exported():
    """Return the names of all series that operator and runtime expose, whether or not they have values yet."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    operator = Metrics().registry
    TunerMetrics(operator)
    families = [*operator.collect(), *RuntimeMetrics("m").registry.collect()]
    return {family.name + suffix for family in families for suffix in suffixes[family.type]}


def queries():
    yield from ((f"alert {rule['alert']}", rule["expr"]) for rule in RULES)
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            yield from ((f"{name}: {panel['title']}", target["expr"]) for target in panel.get("targets", []))
        for variable in board["templating"]["list"]:
            yield f"{name}: variable {variable['name']}", variable.get("definition", "")


def test_every_metric_that_is_asked_for_is_exported():
    known = exported()
    asked = {(where, name) for where, query in queries() for name in METRIC.findall(query)}
    assert len(asked) > 40
    assert {(where, name) for where, name in asked if name not in known} == set()


def test_dashboards_are_those_of_the_generator(monkeypatch):
    monkeypatch.syspath_prepend(CHART.parent)
    for name, text in runpy.run_path(str(CHART.parent / "dashboards.py"))["files"]().items():
        assert (CHART / "files" / "dashboards" / name).read_text() == text, "run make crds"


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_has_no_overlaps_and_unique_ids(name):
    panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_the_chart_carries_dashboards_and_alerts_unchanged():
    options = ("--set", "metrics.dashboards.enabled=true,metrics.prometheusRule.enabled=true")
    documents = render(*options)
    maps = {name: text for d in documents if d["kind"] == "ConfigMap" for name, text in d["data"].items()}
    assert {name: json.loads(text) for name, text in maps.items()} == BOARDS
    (rule,) = [d for d in documents if d["kind"] == "PrometheusRule"]
    assert [r["expr"] for group in rule["spec"]["groups"] for r in group["rules"]] == [r["expr"] for r in RULES]
    urls = [r["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for r in group["rules"]]
    assert all(url.startswith("https://") for url in urls)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_has_a_runbook(rule):
    assert rule["annotations"]["runbook_url"] == "RUNBOOKS#" + rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in RUNBOOKS
    assert rule["labels"]["severity"] in ("warning", "critical")


def _literals(node):
    """Return the strings that an expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return _literals(node.body) | _literals(node.orelse) if isinstance(node, ast.IfExp) else set()


def _reasons_of(node):
    """Return the reasons that a piece of code gives: third word of a Condition, second of a Finding or Decision, first of a
    pair that is returned, `reason=` anywhere."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        place = {"Condition": 2, "Finding": 1, "Decision": 1}.get(name)
        given = [node.args[place]] if place is not None and len(node.args) > place else []
        return set().union(*map(_literals, given + [k.value for k in node.keywords if k.arg == "reason"]))
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and node.value.elts:
        return _literals(node.value.elts[0])
    if isinstance(node, ast.arguments):
        defaults = zip(node.kwonlyargs, node.kw_defaults, strict=True)
        return set().union(*(_literals(value) for argument, value in defaults if argument.arg == "reason"))
    return set()


def reasons():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "operator" / "paceline_operator").rglob("*.py")]
    found = {*KnobState, *Phase, *(f"Reverted{reason}" for reason in Reason), *(reason for _, reason, _ in _START_FAILURES)}
    found = found.union(*(_reasons_of(node) for tree in trees for node in ast.walk(tree)))
    return {str(reason) for reason in found if re.fullmatch(r"[A-Z][A-Za-z]+", reason)}


def test_every_reason_of_a_condition_has_a_runbook():
    found = reasons()
    assert len(found) > 20
    assert sorted(reason for reason in found if f"| `{reason}` |" not in RUNBOOKS) == []


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian's package prometheus) isn't installed")
def test_alerts_fire_and_keep_silent_as_meant(tmp_path):
    (tmp_path / "alerts.yaml").write_text((CHART / "files" / "alerts.yaml").read_text())
    (tmp_path / "tests.yaml").write_text((Path(__file__).parent / "chart_goldens" / "alerts-test.yaml").read_text())
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
