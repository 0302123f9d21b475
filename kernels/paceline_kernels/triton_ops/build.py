"""Compile recorded launches ahead of time, without a GPU, and read what they cost from the binaries."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline_kernels.triton_ops.launch import KernelCall, Target

__all__ = ["Build", "build"]

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# What one thread block may take, in bytes: CUDA C++ Programming Guide, table of technical specifications per compute
# capability (less the 1 KiB that the system keeps); CDNA3 ISA guide, LDS.
_SHARED_LIMIT = {"cuda:80": 166_912, "cuda:90": 232_448, "cuda:100": 232_448, "hip:gfx942": 65_536}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Build:
    """What a compiled launch costs: registers per thread, bytes per thread spilt to memory, bytes shared."""

    kernel: str
    target: str
    registers: int
    spills: int
    shared: int

    @property
    def fits(self) -> bool:
        """Whether a block's shared memory is within the target's limit."""
        return self.shared <= _SHARED_LIMIT[self.target]


def build(call: KernelCall, target: Target) -> Build:
    """Compile `call` for `target` as its launch would. Raises Triton's errors where that fails."""
    options = {"num_warps": call.num_warps, "num_stages": call.num_stages}
    gpu = GPUTarget(target.backend, target.arch, 64 if target.is_hip else 32)
    compiled = triton.compile(_source(call), target=gpu, options=options)
    read = _read_hip if target.is_hip else _read_cuda
    registers, spills = read(compiled)
    return Build(call.kernel.__name__, str(target), registers, spills, compiled.metadata.shared)


def _source(call: KernelCall) -> ASTSource:
    """Specialise arguments as a launch does: None and 1 become constants, multiples of 16 and pointers are marked so."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    marks: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(call.kernel.params):
        value = call.arguments[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            marks[(index,)] = _ALIGNED
    return ASTSource(call.kernel, signature, constants, marks)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _read_cuda(compiled: Any) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)


def _read_hip(compiled: Any) -> tuple[int, int]:
    # scalar registers that overflow go to lanes of vector registers, not to memory; the private segment is what does
    text = compiled.asm["amdgcn"]
    return (
        _number(r"\.vgpr_count:\s+(\d+)", text) + _number(r"\.agpr_count:\s+(\d+)", text),
        _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"the binary's report lacks {pattern}"
    return int(found.group(1))
