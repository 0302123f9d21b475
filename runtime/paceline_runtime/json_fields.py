"""Checked fields of a JSON document: every error names the file, the field, and what it should have been. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_runtime.model_errors import ModelFormatError

__all__ = ["JsonFields"]

_SLIDES = {"sliding_attention": True, "full_attention": False}


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Reads fields of `document`, which came from the file `where`."""

    document: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a field, or `default` if it is absent or null. Raises `ModelFormatError` without either."""
        value = self.document.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFormatError(f"{self.where} lacks {key}")
        return self._checked(key, value, kind)

    def optional(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a field, None if it is null, `default` if it is absent."""
        value = self.document.get(key, default)
        return None if value is None else self._checked(key, value, kind)

    def part(self, key: str) -> JsonFields | None:
        """Return the object in a field, None if it is absent, null or empty."""
        value = self.document.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{self.where}: {key} must be a JSON object, got {_shown(value)}")
        return JsonFields(value, f"{self.where}: {key}")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        values = self.get(key, list)
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            raise ModelFormatError(f"{self.where}: {key} must be a list of numbers")
        return tuple(float(value) for value in values)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them as a tuple; none if the field is absent."""
        value = self.document.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ModelFormatError(f"{self.where}: {key} must be a token id or a list of them, got {_shown(value)}")
        return tuple(dict.fromkeys(ids))

    def layer_types(self, default: Callable[[int], bool]) -> list[bool]:
        """Return for each layer whether it slides: by `layer_types` if the document has it, else by `default`."""
        count = self.get("num_hidden_layers", int)
        types = self.document.get("layer_types")
        if types is None:
            return [default(index) for index in range(count)]
        if not isinstance(types, list) or len(types) != count or not all(name in _SLIDES for name in map(str, types)):
            raise ModelFormatError(
                f"{self.where}: layer_types must name one of {', '.join(_SLIDES)} for each of {count} layers"
            )
        return [_SLIDES[name] for name in types]

    def _checked(self, key: str, value: Any, kind: type) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFormatError(f"{self.where}: {key} must be {kind.__name__}, got {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
