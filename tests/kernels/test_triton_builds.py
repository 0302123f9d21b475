"""Ahead-of-time builds: the matrix holds every kernel, and what a build reports is read from real binaries."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from paceline_kernels import triton_ops
from paceline_kernels.triton_ops import build_all
from paceline_kernels.triton_ops.build import Build
from paceline_kernels.triton_ops.build_cases import build_cases
from paceline_kernels.triton_ops.launch import TARGETS, Target, current_target, launch, recording

CUDA_90, HIP = TARGETS[1], TARGETS[3]


def run(code: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton compiles, which a process under the interpreter can't, with an empty cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-W", "error", *code], env=environment, capture_output=True, text=True, check=False
    )


def jit_functions() -> dict[str, str]:
    """Return each jit-compiled function's name in the package with the source of all modules joined."""
    names, sources = [], []
    for module in pkgutil.iter_modules(triton_ops.__path__):
        path = Path(importlib.import_module(f"paceline_kernels.triton_ops.{module.name}").__file__)
        sources.append(path.read_text())
        names += re.findall(r"@triton\.jit.*\ndef (\w+)", sources[-1])
    joined = "\n".join(sources)
    return dict.fromkeys(names, joined)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_matrix_holds_every_kernel(target: Target) -> None:
    kernels = {name for name, source in jit_functions().items() if not re.search(rf"(?<!def )\b{name}\(", source)}
    built = {call.kernel.__name__ for case in build_cases(target) for call in case.calls(target)}
    missing = kernels - built
    assert missing == (set() if target.has_fp8 else {"_quantise_row"})


def test_float8_is_left_out_where_it_does_not_exist() -> None:
    for target in TARGETS:
        arguments = [v for case in build_cases(target) for call in case.calls(target) for v in call.arguments.values()]
        float8 = any(isinstance(v, torch.Tensor) and v.dtype == torch.float8_e4m3fn for v in arguments)
        assert float8 == target.has_fp8 == (str(target) != "cuda:80")


def build_cleanly(arguments: list[str], cache: Path) -> str:
    done = run(["-m", "paceline_kernels.triton_ops.build_all", "--jobs", "1", *arguments], cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 refused\n")
    return done.stdout


def test_a_kernel_builds_for_nvidia_and_amd_and_its_cost_is_reported(tmp_path: Path) -> None:
    targets = ["--target", "cuda:90", "--target", "hip:gfx942"]
    report = build_cleanly(
        [*targets, "--quick", "--case", "silu_mul", "--case", "matmul torch.bfloat16 × torch.int8"], tmp_path
    )
    assert re.search(r"cuda:90 +_multiply_rows +[1-9]\d* regs +0 B spilt +[1-9]\d* B shared", report)
    assert re.search(r"hip:gfx942 +_multiply_rows +[1-9]\d* regs +0 B spilt +[1-9]\d* B shared", report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quick_selection_builds_for_all_targets(tmp_path: Path) -> None:
    report = build_cleanly(["--quick"], tmp_path)
    assert all(f"{target} " in report for target in TARGETS)


STARVED = """
import dataclasses, json, sys
from paceline_kernels.triton_ops.build import build
from paceline_kernels.triton_ops.build_cases import build_cases
from paceline_kernels.triton_ops.launch import TARGETS
target = next(t for t in TARGETS if str(t) == sys.argv[1])
case = next(c for c in build_cases(target) if c.quick)
call = max(case.calls(target), key=lambda c: c.arguments["BLOCK_M"] * ("BLOCK_N" in c.arguments))
starved = dataclasses.replace(call, arguments=call.arguments | {"BLOCK_N": 128}, num_warps=1)
print(json.dumps(dataclasses.asdict(build(starved, target))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA_90, HIP], ids=str)
def test_a_large_tile_on_one_warp_is_seen_to_spill(target: Target, tmp_path: Path) -> None:
    done = run(["-c", STARVED, str(target)], tmp_path)
    assert done.returncode == 0, done.stderr
    built = Build(**json.loads(done.stdout))
    assert built.kernel == "_attend" and built.registers > 0
    assert build_all._fault(built, may_spill=False) == f"{built.spills} bytes per thread are spilt"


def test_spills_and_shared_memory_beyond_the_target_are_faults() -> None:
    fine = Build("k", "hip:gfx942", 128, 0, 65_536)
    assert build_all._fault(fine, may_spill=False) is None
    assert "shared" in build_all._fault(replace(fine, shared=65_537), may_spill=True)
    assert "spilt" in build_all._fault(replace(fine, spills=8), may_spill=False)
    assert build_all._fault(replace(fine, spills=8), may_spill=True) is None


def test_builds_are_refused_under_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    if not build_all.INTERPRETED:
        pytest.skip("there is a GPU, and no interpreter")
    with pytest.raises(SystemExit):
        build_all.main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_recording_collects_launches_and_ends_with_its_block() -> None:
    with recording(HIP) as records:
        assert current_target() is HIP
        launch("kernel", (0, 5), {"x": 1}, num_warps=2, num_stages=3)
    assert [(c.kernel, c.arguments, c.num_warps, c.num_stages) for c in records.calls] == [("kernel", {"x": 1}, 2, 3)]
    assert current_target() is not HIP


def test_the_package_does_not_need_triton_until_an_op_is_used() -> None:
    code = "import sys; sys.modules['triton'] = None; import paceline_kernels, paceline_kernels.triton_ops"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
