"""What all bodies that clients send have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["Body", "refused"]

# pydantic collects every error before it tells one: 45 s for a body of 8 MB that is wrong throughout. So objects have few
# members, and lists are declared to fail fast.
_MAX_MEMBERS = 100


class Body(BaseModel):
    """An object that a client sends: nothing unknown, and no types that only resemble the right one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_members(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > _MAX_MEMBERS:
            raise ValueError(f"an object here may have at most {_MAX_MEMBERS} members, got {len(data)}")
        return data


def refused(param: str, message: str) -> PydanticCustomError:
    """Return the error of a whole body that is due to one parameter; pydantic gives such errors no place."""
    return PydanticCustomError("refused_parameter", "{words}", {"words": message, "param": param})
