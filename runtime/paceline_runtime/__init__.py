"""The runtime: an OpenAI-compatible server with continuous batching, and the same engine offline (`LLM`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_runtime.llm import LLM, Generated
    from paceline_runtime.sampling_params import SamplingParams

__all__ = ["LLM", "Generated", "SamplingParams"]

_HOMES = {"LLM": "llm", "Generated": "llm", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import paceline_runtime` stays light (PEP 562)."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
