"""Fixtures of the runtime's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_process import RuntimeProcess, clock_runtime

# Triton reads it when it is first imported, and something else may import it before the tests that want it
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

StartRuntime = Callable[..., RuntimeProcess]


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimeProcess]:
    """One fast clock runtime for the tests of a module that leave it as it was."""
    with clock_runtime(tmp_path_factory.mktemp("runtime"), "--served-model-name", "clock") as runtime:
        yield runtime


@pytest.fixture
def start_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRuntime]:
    """Start clock runtimes of one's own: `start_runtime("--max-num-seqs", "2", model=SLOW)`."""
    with ExitStack() as stack:

        def start(*args: str, model: dict[str, Any] | None = None) -> RuntimeProcess:
            folder: Path = tmp_path_factory.mktemp("runtime")
            return stack.enter_context(clock_runtime(folder, *args, model=model))

        yield start
