"""Triton kernels run under the interpreter where there is no GPU; Triton reads the switch when it is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from paceline_kernels.cpu import native


@pytest.fixture(params=native.CPU_KERNELS)
def kernels(request):
    """Each form of the native CPU kernels that this CPU has, in use."""
    try:
        yield native.start(request.param, threads=2)
    except RuntimeError:
        pytest.skip(f"this CPU has no {request.param}")
    native.start()
