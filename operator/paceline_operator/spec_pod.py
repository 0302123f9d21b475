"""The parts of a spec that are about one pod: its device, CPU and memory, environment and tolerations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.errors import Problem
from paceline_operator.fields import item
from paceline_operator.kinds import Integer, MapOf, Quantity, Raw, Text

__all__ = ["Accelerator", "EnvVar", "Resources", "Toleration", "env_problems"]

_LABEL_KEY = r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """The device that each pod gets. Without it pods run on the CPU."""

    resource: str = item(
        Text(pattern=_LABEL_KEY, example="nvidia.com/gpu"),
        "Extended resource of the device plugin. Default nvidia.com/gpu.",
        default="nvidia.com/gpu",
    )
    count: int = item(Integer(1, 64), "Devices per pod. Default 1.", default=1)
    product: str | None = item(
        Text(63, r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", example="NVIDIA-H100-80GB-HBM3"),
        "Product, as the vendor's feature discovery labels nodes with it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """CPU and memory of the runtime container."""

    limits: Mapping[str, str] | None = item(MapOf(Quantity()), "Most it may use; sizes threads and the KV cache on CPU.")
    requests: Mapping[str, str] | None = item(MapOf(Quantity()), "What the scheduler sets aside. Default: the limits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """One environment variable of the runtime container."""

    name: str = item(Text(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", example="HF_ENDPOINT"), "Name.", required=True)
    value: str | None = item(Text(32_768, min_length=0), "Value.")
    value_from: Mapping[str, Any] | None = item(
        Raw(("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef")), "Source of the value, as in a Pod."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that pods tolerate, as in a Pod."""

    key: str | None = item(Text(317, _LABEL_KEY, example="nvidia.com/gpu"), "Key of the taint.")
    operator: str | None = item(Text(choices=("Exists", "Equal")), "Exists or Equal.")
    value: str | None = item(Text(63, min_length=0), "Value of the taint for Equal.")
    effect: str | None = item(Text(choices=("NoSchedule", "PreferNoSchedule", "NoExecute")), "Effect of the taint.")
    toleration_seconds: int | None = item(Integer(0, 1 << 31), "Seconds for which NoExecute is tolerated.")


def env_problems(env: tuple[EnvVar, ...]) -> Iterator[Problem]:
    """Yield what is wrong between variables that are each fine."""
    names = [variable.name for variable in env]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("spec.env", name, "one entry per name", f"keep one entry named {name}")
    for i, variable in enumerate(env):
        if variable.value is not None and variable.value_from is not None:
            yield Problem(f"spec.env[{i}]", variable.name, "either value or valueFrom", "keep one of the two")
