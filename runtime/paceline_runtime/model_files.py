"""What kind of model lies at a URI: a GGUF file, or a Hugging Face folder. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paceline_runtime.model_errors import ModelNotFound
from paceline_runtime.uri import resolve_model

__all__ = ["ModelFiles", "ModelKind", "locate_model"]


class ModelKind(StrEnum):
    """The two layouts that weights come in."""

    GGUF = "gguf"
    HUGGING_FACE = "hugging face"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: a GGUF file, or a folder with `config.json` and safetensors."""

    kind: ModelKind
    path: Path

    @property
    def name(self) -> str:
        """A short name for logs and the default served name."""
        return self.path.stem if self.kind is ModelKind.GGUF else self.path.resolve().name


def locate_model(uri: str, revision: str | None = None) -> ModelFiles:
    """Return the files of `uri` (see `uri.resolve_model`). Raises `UriError` or `ModelNotFound`."""
    path = resolve_model(uri, revision)
    if path.is_file():
        return ModelFiles(ModelKind.GGUF, path)
    if (path / "config.json").is_file():
        return ModelFiles(ModelKind.HUGGING_FACE, path)
    candidates = sorted(path.glob("*.gguf"))
    if len(candidates) == 1:
        return ModelFiles(ModelKind.GGUF, candidates[0])
    found = f"{len(candidates)} GGUF files (name one)" if candidates else "neither config.json nor a GGUF file"
    raise ModelNotFound(f"model {uri!r}: {path} holds {found}")
