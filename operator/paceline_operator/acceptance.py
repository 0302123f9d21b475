"""Whether a manifest can be used, and what it comes to: the one source of `SpecValid` and of the admission webhook. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_operator.classes import ClassBook
from paceline_operator.errors import SpecError
from paceline_operator.inherit import resolve
from paceline_operator.limits import limit_problems
from paceline_operator.policy import policy_problems, rules_of
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService

__all__ = ["accept"]


def accept(body: Mapping[str, Any], classes: ClassBook, settings: Settings) -> InferenceService:
    """Return the service of a manifest, under its class. Raises `SpecError` with every problem of the first depth that has
    any: the class, then the fields, then what class and operator allow."""
    cls = classes.of(body)
    service = resolve(body, cls)
    problems = [*policy_problems(service, rules_of(settings, cls)), *(limit_problems(service, cls) if cls else ())]
    if problems:
        raise SpecError(tuple(problems))
    return service
