"""Guards on the layout: what would shadow the standard library or break the import layers."""

import operator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_operator_folder_is_not_a_package():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not list((ROOT / "operator").glob("*.py"))
    assert not list((ROOT / "runtime").glob("*.py"))


def test_standard_library_operator_wins():
    assert ROOT not in Path(operator.__file__).parents
    assert operator.add(1, 2) == 3


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_no_tests_beside_the_code():
    for folder in ("operator", "runtime", "kernels"):
        assert not list((ROOT / folder).rglob("test_*.py"))
        assert not list((ROOT / folder).rglob("conftest.py"))
