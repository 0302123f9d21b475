"""Which files of a Hugging Face repository a model needs: safetensors before GGUF, never pickles. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from paceline_runtime.model_errors import ModelFormatError, ModelNotFound

__all__ = ["INDEX", "describing_files", "weight_files"]

INDEX = "model.safetensors.index.json"
_DESCRIBING = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def describing_files(names: Iterable[str]) -> list[str]:
    """Return the files that say what the model is and how it reads text."""
    return [name for name in names if name in _DESCRIBING]


def weight_files(names: Collection[str], indexed: Collection[str] | None, where: str) -> list[str]:
    """Return the files of weights. `indexed` are those that the repository's index names, None if it has none.

    Raises `ModelNotFound` if there is nothing that may be loaded, `ModelFormatError` for an index that leads elsewhere.
    """
    if indexed is not None:
        lost = [name for name in indexed if name not in names]
        if lost:
            raise ModelFormatError(f"{where}: {INDEX} names {lost[0]!r}, which the repository doesn't hold")
        return sorted(indexed)
    top = [name for name in names if "/" not in name]
    if "model.safetensors" in top:
        return ["model.safetensors"]
    for suffix in (".safetensors", ".gguf"):
        found = sorted(name for name in top if name.endswith(suffix))
        if suffix == ".gguf" and len(found) > 1:
            raise ModelNotFound(f"{where} holds {len(found)} GGUF files: name one, as in {where}/{found[0]}")
        if found:
            return found
    pickled = sorted(name for name in top if PurePosixPath(name).suffix in _PICKLES)
    held = f"only pickled weights ({pickled[0]}), which are never loaded" if pickled else "no weights"
    raise ModelNotFound(f"{where} holds {held}: a model needs .safetensors or .gguf files")
