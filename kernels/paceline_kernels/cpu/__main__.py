"""`python -m paceline_kernels.cpu` compiles the CPU kernels for this machine's torch, once."""

import sys

from paceline_kernels.cpu.build import main

sys.exit(main())
