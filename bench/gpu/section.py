"""Runs one section in this process: `python -m bench.gpu.section NAME OUT [--dry] [--measured FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench.gpu.context import Context


def _device(context: Context) -> None:
    import platform

    import torch
    import triton
    from bench.gpu.timing import copy_rate, product_rate

    sizes = context.sizes
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    name = torch.cuda.get_device_name(sizes.device) if sizes.device.type == "cuda" else platform.machine()
    context.put("device", name=name, **versions)
    rates = {"copy_bytes_per_s": copy_rate(sizes.copy_bytes, sizes.device),
             "product_flop_per_s": product_rate(sizes.product, sizes.dtype, sizes.device)}  # fmt: skip
    context.put("rates", **rates)


def _correctness(context: Context) -> None:
    from bench.gpu.correctness import run

    run(context)


def _tokens(context: Context) -> None:
    from bench.gpu.tokens import run

    run(context)


def _kernels(context: Context) -> None:
    from bench.gpu.kernels import run

    run(context)


def _engine_8b(context: Context) -> None:
    from bench.gpu.engine import run

    run(context, "8b")


def _engine_small(context: Context) -> None:
    from bench.gpu.engine import run

    run(context, "0.6b")


def _load(context: Context) -> None:
    from bench.gpu.load import run_ours

    run_ours(context, "8b")


def _peers(context: Context) -> None:
    from bench.gpu.load import run_peers

    run_peers(context, "8b")


# name → what it does and the seconds that it may take
SECTIONS: dict[str, tuple[Callable[[Context], None], int]] = {
    "device": (_device, 40),
    "correctness": (_correctness, 110),
    "engine-8b": (_engine_8b, 90),
    "load": (_load, 60),
    "peers": (_peers, 110),
    "kernels": (_kernels, 80),
    "engine-0.6b": (_engine_small, 60),
    "tokens": (_tokens, 45),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--measured", type=Path)
    options = parser.parse_args()
    from bench.gpu.sizes import dry_sizes, full_sizes

    measured = {}
    if options.measured is not None and options.measured.exists():
        (measured,) = json.loads(options.measured.read_text()).get("rates", [{}])
    context = Context(dry_sizes() if options.dry else full_sizes(), options.out, measured)
    SECTIONS[options.name][0](context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
