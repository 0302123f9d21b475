"""Triton kernels run under the interpreter where there is no GPU; Triton reads the switch when it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
