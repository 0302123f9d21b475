"""Device functions that several kernels share."""

import triton
import triton.language as tl

__all__ = ["dot", "quantise", "tanh", "to_float"]


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """Return a · b + acc, accumulated in float32; `PRECISION` is how float32 operands are multiplied.

    `WIDE` multiplies in float32 instead: exact for 16-bit operands, and what the interpreter needs, whose products of
    bfloat16 multiply bit patterns.
    """
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def tanh(x):
    """Return tanh of a float32 tensor."""
    # the sign is put back at the end, so that no exponent is positive and nothing overflows
    shrink = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrink) / (1.0 + shrink)
    return tl.where(x < 0, -size, size)


@triton.jit
def to_float(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `x`, of a float dtype or int8, in float `dtype`."""
    if INTERPRETED:
        x = x.to(tl.float32)  # its casts from integers to bfloat16 give their bits
    return x.to(dtype)


@triton.jit
def quantise(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the float32 `x`, already scaled into range, rounded to int8, or to the nearest even of a float8 `dtype`."""
    if dtype == tl.int8:
        # casts to integers truncate; half is rounded up, which moves the value by no more than another tie rule would
        x = tl.floor(x + 0.5)
    elif INTERPRETED:
        # the interpreter's cast loses the carry of a mantissa that rounds up to the next power of two: round to
        # float8_e4m3fn's 3 bits of 23 here, so that the cast has nothing left to round
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return x.to(dtype)
