"""What can be said of the images without building them; `tests/e2e/test_images.py` runs them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = {name: (ROOT / name / "Dockerfile").read_text() for name in ("operator", "runtime")}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_as_the_pods_expect(name):
    text = DOCKERFILES[name]
    assert "HEALTHCHECK" not in text
    assert "PYTHONSAFEPATH=1" in text
    assert "PIP_CONSTRAINT=/src/constraints.txt" in text
    (user,) = re.findall(r"^USER (\d+):\1$", text, re.MULTILINE)
    assert user == {"operator": "65532", "runtime": "10001"}[name]
    assert f'ENTRYPOINT ["paceline-{name}"]' in text


def test_the_default_runtime_target_is_cuda():
    assert re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILES["runtime"], re.MULTILINE)[-2:] == ["cpu", "cuda"]


def test_only_what_is_built_from_is_sent_to_the_builder():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert sent == {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "examples",
        "kernels",
        "operator",
        "pyproject.toml",
        "runtime",
    }
    assert all((ROOT / name).exists() for name in sent)


@pytest.fixture
def compiler(tmp_path):
    """`triton-cc` as it stands in the image, with something to hand out and no other program but cp."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "triton").mkdir(parents=True)
    (tmp_path / "lib" / "triton" / "cuda_utils.so").write_text("the module")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "cp").symlink_to(shutil.which("cp"))
    program = tmp_path / "bin" / "triton-cc"
    shutil.copy(ROOT / "runtime" / "triton-cc", program)

    def run(*args):
        env = os.environ | {"PATH": str(tmp_path / "path")}
        return subprocess.run([program, *args], check=False, capture_output=True, text=True, env=env)

    return run


def test_triton_gets_its_driver_module_without_a_compiler(compiler, tmp_path):
    target = tmp_path / "cuda_utils.so"
    # as triton.runtime.build calls it
    done = compiler("/x/triton/backends/nvidia/driver.c", "-O3", "-shared", "-o", str(target), "-l:libcuda.so.1", "-I/x")
    assert done.returncode == 0, done.stderr
    assert target.read_text() == "the module"


@pytest.mark.parametrize("args", [("/tmp/other.c", "-o", "out.so"), ("/x/nvidia/driver.c",), ()])
def test_nothing_else_is_passed_off_as_compiled(compiler, args):
    done = compiler(*args)
    assert done.returncode == 1
    assert "no C compiler" in done.stderr
