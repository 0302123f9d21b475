"""JSON files of models, bounded in size, and the index of sharded weights. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline_runtime.model_errors import ModelFormatError

__all__ = ["read_json", "shard_names"]

_MAX_JSON = 256 * 1024 * 1024  # the largest tokenizer.json in use is about 33 MB


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; an absent file is an empty object. Raises `ModelFormatError`."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_JSON:
        raise ModelFormatError(f"{path} has {path.stat().st_size} bytes, more than {_MAX_JSON}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, UTF-8, or a number of too many digits
        raise ModelFormatError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelFormatError(f"{path} must hold a JSON object")
    return document


def shard_names(index: Mapping[str, Any]) -> list[str]:
    """Return the files that a model.safetensors.index.json names. Raises `ModelFormatError` if one isn't beside it."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFormatError("model.safetensors.index.json: weight_map must map tensors to files")
    names = sorted(set(weight_map.values()))
    # "." and ".." have themselves for a name
    if any(Path(name).name != name or name in ("", ".", "..") or "\0" in name or "\\" in name for name in names):
        raise ModelFormatError("model.safetensors.index.json names a file outside its folder")
    return names
