"""`make gpu-check` without a GPU: what it may import, that a section that hangs is cut off, a dry run of every section."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# what the machine that it is made for doesn't have, or might not have
ABSENT = (
    "pytest", "zmq", "msgspec", "fastapi", "starlette", "uvicorn", "pydantic", "gguf", "psutil", "prometheus_client",
    "llguidance", "jinja2", "httptools", "uvloop", "kopf", "aiohttp", "hypothesis",
)  # fmt: skip
BLOCKER = """
import importlib.util, sys
def is_absent(name):
    return name.partition(".")[0] in {absent!r}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if is_absent(name):
            raise ModuleNotFoundError(f"No module named {{name!r}}, as on a bare machine", name=name)
sys.meta_path.insert(0, Absent())
look = importlib.util.find_spec  # who only asks whether it is there gets an answer
importlib.util.find_spec = lambda name, package=None: None if is_absent(name) else look(name, package)
"""

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import gpu_check  # noqa: E402
from bench.gpu.engine import idle_share  # noqa: E402
from bench.gpu.report import markdown  # noqa: E402
from bench.gpu.section import SECTIONS  # noqa: E402


def bare(folder: Path, *command: str, absent: tuple[str, ...] = ABSENT) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository without an installed Paceline and without `absent` packages."""
    blocker = folder / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(BLOCKER.format(absent=set(absent)))
    paths = [blocker, ROOT / "runtime", ROOT / "kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OUT": str(folder / "copy")}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_it_imports_nothing_that_a_bare_machine_lacks(tmp_path):
    names = sorted(f"bench.gpu.{path.stem}" for path in (ROOT / "bench" / "gpu").glob("*.py"))
    assert len(names) >= 10
    done = bare(
        tmp_path, "-c", f"import {', '.join(names)}, bench.gpu_check", absent=(*ABSENT, "tokenizers", "click", "rich")
    )
    assert done.returncode == 0, done.stderr


def test_a_section_that_hangs_costs_only_itself(tmp_path):
    section = gpu_check.run_section("tokens", tmp_path, 0.2, dry=True)
    assert section["state"].startswith("cut off")
    assert section["results"] == {}
    assert not gpu_check.sound(section)
    assert gpu_check.run_section("tokens", tmp_path, -1.0, dry=True)["state"].startswith("left out")


def test_the_limits_fit_the_lease():
    assert gpu_check.TOTAL_SECONDS < 480
    assert all(limit < gpu_check.TOTAL_SECONDS for _, limit in SECTIONS.values())


def test_wrong_numbers_and_failed_kernels_fail_the_check():
    def section(**results):
        return {"state": "done", "seconds": 1.0, "results": results}

    assert gpu_check.sound(section(cases=[{"good": True}], failed=[{"engine": "a peer"}]))
    assert not gpu_check.sound(section(cases=[{"good": True}, {"good": False}]))
    assert not gpu_check.sound(section(tokens=[{"good": False}]))
    assert not gpu_check.sound(section(failed=[{"kernel": "products"}]))


def test_idle_time_is_what_no_span_covers():
    assert idle_share([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 10.0)]) == pytest.approx(0.2)
    assert idle_share([(0.0, 1.0)]) == 0
    assert idle_share([]) is None


def test_the_report_shows_bad_cases_only_and_says_what_a_dry_run_is():
    cases = [{"case": "fine", "good": True}, {"case": "off", "good": False}]
    text = markdown(
        {"dry": True, "sections": {"correctness": {"state": "done", "seconds": 1.0, "results": {"cases": cases}}}}
    )
    assert "Nothing here is a measurement" in text
    assert "2 cases, 1 bad" in text
    assert "off" in text and "fine" not in text


def test_rates_are_measured_and_written_twice(tmp_path):
    done = bare(tmp_path, "-m", "bench.gpu_check", "--dry", "--out", str(tmp_path / "out"), "--only", "device")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert document["dry"] is True
    assert document["sections"]["device"]["results"]["rates"][0]["copy_bytes_per_s"] > 0
    assert (tmp_path / "copy" / "gpu_check.md").read_text() == (tmp_path / "out" / "gpu_check.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers isn't installed")
def test_every_section_runs_dry_on_a_bare_machine(tmp_path):
    done = bare(tmp_path, "-m", "bench.gpu_check", "--dry", "--out", str(tmp_path / "out"))
    sections = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(sections) == list(SECTIONS)
    cases = sections["correctness"]["results"]["cases"]
    assert len(cases) >= 15 and all(case["good"] for case in cases)
    assert {row["engine"] for row in sections["load"]["results"]["load"]} >= {"Paceline, continuous", "Paceline, static"}
    assert "failed" not in sections["kernels"]["results"], sections["kernels"]["results"]
    assert all(row["good"] for row in sections["tokens"]["results"]["tokens"])
    assert sections["peers"]["results"]["load"]
