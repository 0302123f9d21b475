"""The ops in Triton, for NVIDIA (sm_80 and later) and AMD (gfx942): one module per op, each with its kernel and launcher.

Import a module only where its kernels will run: a CPU-only install has no Triton. Nothing here reads a tensor's contents
on the host, so that every launcher may run inside a CUDA graph; what the host must know is planned beforehand with numpy.
"""

import os

# Multiply-adds may fuse: the tests' tolerances allow for it, and without it the softmax rescaling takes twice the
# instructions. Triton 3.10 changes the default and 3.9 warns about it, so it is stated; a value set by the user wins.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
