"""What the tests of the Triton kernels share: where they run, what they may be off by, and random inputs."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# What a result may differ from the float64 reference on the same inputs, absolute and relative: a few roundings of the
# dtype. bfloat16 has 8 bits, and the interpreter truncates where a GPU rounds, so its errors are one-sided there.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2},
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare with a float64 reference within the dtype's tolerance."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCE[dtype or actual.dtype])
