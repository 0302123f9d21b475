"""Compiles the CPU kernels for this torch: `python -m paceline_kernels.cpu` (`make setup` runs it).

The library's name holds a hash of its sources, the flags, the machine and torch, so that a change of any of them makes
another library, and an old one is never loaded by mistake.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

__all__ = ["BuildError", "build", "library_path"]

DIRECTORY_ENV = "PACELINE_NATIVE_DIR"
_SOURCES = Path(__file__).parent / "csrc"
# gcc 12's own intrinsics set off the warning about uninitialised values
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wno-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_X86 = {
    "kernels_avx2.cpp": _AVX2,
    "kernels_avx512.cpp": _AVX512,
    "kernels_amx.cpp": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
_COMMON = ("kernels_generic.cpp", "features.cpp", "team.cpp", "product.cpp", "step.cpp", "unpack_row.cpp", "bindings.cpp")


class BuildError(RuntimeError):
    """The kernels couldn't be compiled; the message says why."""


def library_path() -> Path:
    """Return where the library for these sources and this torch is, whether or not it has been built."""
    digest = hashlib.sha256(repr((torch.__version__, platform.machine(), _FLAGS, _X86)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = os.environ.get(DIRECTORY_ENV) or Path(sys.prefix) / "share" / "paceline"
    return Path(folder) / f"paceline_cpu-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the library unless it is there, and return its path. Raises `BuildError`."""
    target = library_path()
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one by CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = [_compile(compiler, name, flags, Path(folder)) for name, flags in _units().items()]
        # renamed when whole: another process may load it at this moment
        draft = target.with_suffix(f".{os.getpid()}")
        lib = Path(torch.__file__).parent / "lib"
        links = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-pthread"]
        _run([compiler, "-shared", *map(str, objects), *links, "-o", str(draft)])
        draft.rename(target)
    return target


def _units() -> dict[str, tuple[str, ...]]:
    units: dict[str, tuple[str, ...]] = dict.fromkeys(_COMMON, ())
    return {**units, **_X86} if platform.machine() in ("x86_64", "AMD64") else units


def _compile(compiler: str, name: str, flags: tuple[str, ...], folder: Path) -> Path:
    include = Path(torch.__file__).parent / "include"
    headers = [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    output = folder / (name + ".o")
    _run([compiler, "-c", str(_SOURCES / name), *_FLAGS, *flags, abi, *headers, "-o", str(output)])
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-4000:]}")


def main() -> int:
    """Build, and say where; a machine without a compiler is no error, since torch's kernels do the work there."""
    try:
        print(f"native CPU kernels: {build()}")
    except BuildError as error:
        print(f"native CPU kernels not built, torch's are used instead, several times slower: {error}", file=sys.stderr)
    return 0
