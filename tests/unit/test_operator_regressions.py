"""docs/operator-regressions.md names tests and lines of code: each is where it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operator-regressions.md").read_text()
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").glob("*/test_*.py")}
LINES = re.findall(r"\| `([\w./]+\.(?:py|yaml))`: `([^`]+)` \|", PAGE)


@pytest.mark.parametrize(("file", "name"), re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE))
def test_a_named_test_exists(file, name):
    assert f"def {name}(" in TESTS[file]


@pytest.mark.parametrize(("file", "words"), LINES)
def test_a_named_line_exists(file, words):
    path = ROOT / file if "/" in file else ROOT / "operator" / "paceline_operator" / file
    assert words in path.read_text()


def test_every_complaint_has_a_line():
    complaints = PAGE.partition("## Bad input")[0].count("\n| ") - 1
    assert complaints == len(LINES) == 18
