"""Finds the compiled CPU kernels, and starts them with this process's threads."""

from __future__ import annotations

import functools

import torch

from paceline_kernels.cpu.build import library_path
from paceline_kernels.dispatch import chosen_by_use

__all__ = ["CPU_KERNELS", "in_use", "is_built", "running", "start"]

# From the widest instruction set to plain C++; `auto` takes the first that the CPU has.
CPU_KERNELS = ("amx", "avx512", "avx2", "generic")


def is_built() -> bool:
    """Tell whether the library for these sources and this torch is there. Nothing is compiled here."""
    return _load()


def in_use() -> bool:
    """Tell whether what is made here for a CPU is to run in the native kernels: by `use_kernels`, if they are built."""
    return chosen_by_use() in ("auto", "native") and is_built()


def start(kernels: str = "auto", threads: int | None = None) -> str:
    """Use `kernels` (`auto` or one of `CPU_KERNELS`) with `threads` (None: torch's) from now on; return their name.

    Raises `RuntimeError` for kernels that this CPU can't run.
    """
    assert is_built(), "python -m paceline_kernels.cpu comes first"
    name: str = torch.ops.paceline_cpu.start(kernels, threads or torch.get_num_threads())
    return name


def running() -> tuple[str, int]:
    """Return the name of the kernels in use and their number of threads."""
    assert is_built(), "python -m paceline_kernels.cpu comes first"
    name, threads = torch.ops.paceline_cpu.running()
    return name, threads


@functools.cache
def _load() -> bool:
    path = library_path()
    if not path.exists():
        return False
    torch.ops.load_library(str(path))
    torch.ops.paceline_cpu.start("auto", torch.get_num_threads())
    return True
