"""The kernels: one module per op, with a launcher and a reference; ops dispatch by device."""
