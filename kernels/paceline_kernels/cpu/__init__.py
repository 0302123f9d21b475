"""The CPU's own kernels: C++ for AVX2, AVX-512 and AMX beside portable code, compiled once for this machine (`build`).

`native` finds and starts the compiled library, `packed` makes its weights, `layers` runs a decoder's layers in one call.
"""
