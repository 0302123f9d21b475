"""How many KV blocks fit: the arithmetic of `kvMemoryFraction`, in plain ints, and the limits it starts from. No torch here.

    limit       the container's memory (CPU) or the device's (GPU)
  - base        what the processes held before the weights
  - weights
  - activations peak of one step
  = free        of which kv_memory_fraction goes to the KV cache

With vLLM's `gpu_memory_utilization` u instead, the KV cache takes what u × limit leaves after base, weights, activations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline_core.errors import FormatError
from paceline_runtime.model_errors import MemoryBudgetError

__all__ = ["MEMORY_LIMIT_ENV", "MemoryBudget", "cpu_memory_limit", "memory_limit"]

MEMORY_LIMIT_ENV = "PACELINE_MEMORY_LIMIT"  # bytes, from limits.memory by the downward API
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 says "no limit" with a number near 2^63
# Without any limit the whole machine isn't ours to fill: the KV cache stays below what vLLM takes on a CPU by default.
_UNLIMITED_KV_BYTES = 4 * 1024**3
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a device holds, in bytes; `block_bytes` is one KV block over all layers.

    `activations` are those of a step of `step_tokens` tokens, which the server started with; `token_bytes` each token more.
    `max_blocks` caps the pool: more blocks than the most sequences of the greatest length can fill would never be used.
    `max_kv_bytes` caps it where nobody set a limit. `remedy` is what to do if nothing is left.
    """

    limit: int
    base: int
    weights: int
    activations: int
    step_tokens: int
    token_bytes: int
    block_bytes: int
    max_blocks: int
    max_kv_bytes: int | None = None
    remedy: str = "raise limits.memory, or lower maxNumBatchedTokens, maxNumSeqsLimit or maxModelLen"

    @property
    def free(self) -> int:
        """Bytes left for the KV cache after everything else (0 if nothing is)."""
        return max(0, self.limit - self.base - self.weights - self.activations)

    def blocks_for(self, kv_memory_fraction: float) -> int:
        """Return the blocks that this share of the free memory holds. Raises `MemoryBudgetError` if it holds none."""
        return self._blocks(int(self.free * kv_memory_fraction), f"kvMemoryFraction {kv_memory_fraction:g}")

    def blocks_for_utilization(self, gpu_memory_utilization: float) -> int:
        """Return the blocks under vLLM's setting, a share of the limit. Raises `MemoryBudgetError` if there are none."""
        left = int(self.limit * gpu_memory_utilization) - self.base - self.weights - self.activations
        return self._blocks(left, f"gpu_memory_utilization {gpu_memory_utilization:g}")

    def check_step(self, tokens: int, num_blocks: int) -> None:
        """Raise `MemoryBudgetError` if steps of so many tokens have no memory beside a pool of so many blocks."""
        more = self.token_bytes * max(0, tokens - self.step_tokens)
        left = self.free - num_blocks * self.block_bytes
        if more > max(0, left):
            raise MemoryBudgetError(
                f"maxNumBatchedTokens {tokens}: its steps may take {more // _MIB} MiB more than those of {self.step_tokens}"
                f" tokens that the server started with, and {max(0, left) // _MIB} MiB are left beside the KV pool; lower"
                " kvMemoryFraction, or start the server with this budget"
            )

    def with_free(self, free: int) -> MemoryBudget:
        """Return this budget with no more than `free` bytes left, as a rank has whose fellows have less."""
        return replace(self, base=self.base + max(0, self.free - free))

    def describe(self, num_blocks: int, block_size: int) -> str:
        """Return the arithmetic in one line, for the log."""
        return (
            f"KV pool: {num_blocks} blocks of {block_size} tokens, {num_blocks * self.block_bytes} bytes"
            f" = share of {self.free} free bytes (limit {self.limit} - base {self.base} - weights {self.weights}"
            f" - activations {self.activations}), {self.block_bytes} bytes per block, {self.max_blocks} useful at most"
        )

    def _blocks(self, kv_bytes: int, setting: str) -> int:
        if self.max_kv_bytes is not None:
            kv_bytes = min(kv_bytes, self.max_kv_bytes)
        blocks = min(kv_bytes // self.block_bytes, self.max_blocks)
        if blocks < 1:
            raise MemoryBudgetError(
                f"no memory for a KV cache under {setting}: {self.limit // _MIB} MiB - {self.base // _MIB} base"
                f" - {self.weights // _MIB} weights - {self.activations // _MIB} activations leave less than a block;"
                f" {self.remedy}"
            )
        return blocks


def memory_limit() -> int | None:
    """Return the bytes that this container may take (control group or environment), or None if nobody says."""
    limits = [*_environment_limit(), *_cgroup_limits()]
    return min(limits) if limits and min(limits) < _machine().total else None


def cpu_memory_limit() -> tuple[int, int | None]:
    """Return the memory of this container in bytes, and a cap on the KV cache if nobody limits the container.

    The limit is the smallest of the control group's (and its parents') and `PACELINE_MEMORY_LIMIT`; without either it is
    what the machine has left. Raises `FormatError` for an environment variable that is no number of bytes.
    """
    limits = [*_environment_limit(), *_cgroup_limits()]
    machine = _machine()
    if limits and min(limits) < machine.total:
        return min(limits), None
    return machine.available + _own_bytes(), _UNLIMITED_KV_BYTES


def _environment_limit() -> Iterator[int]:
    text = os.environ.get(MEMORY_LIMIT_ENV, "")
    if not text or text == "0":  # the downward API gives the node's memory, and some agents 0, where no limit is set
        return
    if not text.isascii() or not text.isdecimal():
        raise FormatError(f"{MEMORY_LIMIT_ENV}={text!r} must be a whole number of bytes")
    yield int(text)


def _cgroup_limits() -> Iterator[int]:
    for folder, name in _cgroup_folders():
        # a limit may sit on any parent; inside a container the own group is mounted as the root
        for parent in (folder, *folder.parents):
            if not parent.is_relative_to(_CGROUP_ROOT):
                break
            limit = _read_limit(parent / name)
            if limit is not None:
                yield limit


def _cgroup_folders() -> Iterator[tuple[Path, str]]:
    try:
        lines = _SELF_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield _CGROUP_ROOT / path.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            yield _CGROUP_ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _machine() -> Any:
    """Return psutil's view of the machine's memory; what runs on a GPU alone doesn't need psutil."""
    import psutil

    return psutil.virtual_memory()


def _own_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
