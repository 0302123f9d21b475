"""What a model's files hold: its configuration, and where its weights are (not read yet)."""

from __future__ import annotations

from paceline_runtime.config_gguf import config_from_gguf
from paceline_runtime.config_hugging_face import config_from_hugging_face
from paceline_runtime.gguf_file import read_gguf
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import UnsupportedModel
from paceline_runtime.model_files import ModelFiles, ModelKind
from paceline_runtime.model_json import read_json
from paceline_runtime.quantised_linear import QUANTIZATIONS
from paceline_runtime.weights import RandomWeights, SafetensorsWeights, SplitWeights, WeightSource
from paceline_runtime.weights_gguf import GgufWeights, check_quantization

__all__ = ["open_model", "quantization_at_load"]


def open_model(
    files: ModelFiles, quantization: str | None = None, *, dummy: bool = False, seed: int = 0
) -> tuple[ModelConfig, WeightSource]:
    """Return what the model at `files` looks like and a source of its weights, random ones drawn from `seed` if `dummy`.

    `quantization` is one of `QUANTIZATIONS`, which changes nothing here, or what the files must hold already: `gguf` or a
    GGUF type such as `Q4_1`. Raises a `ModelError`.
    """
    stored = quantization if quantization_at_load(quantization) is None else None
    if files.kind is ModelKind.GGUF:
        file = read_gguf(files.path)
        config = config_from_gguf(file)
        check_quantization(file, stored)
        weights: WeightSource = RandomWeights(seed) if dummy else GgufWeights(file, config)
    else:
        config = config_from_hugging_face(read_json(files.path / "config.json"))
        if stored is not None:
            raise UnsupportedModel(
                f"quantization {stored!r} isn't supported for safetensors: use {', '.join(QUANTIZATIONS)}, or a GGUF file"
            )
        weights = RandomWeights(seed) if dummy else SafetensorsWeights(files.path)
    return config, SplitWeights(weights, config) if config.fused_weights and not dummy else weights


def quantization_at_load(quantization: str | None) -> str | None:
    """Return the quantisation that is made while loading, None if the setting speaks of what the files hold."""
    return quantization if quantization in QUANTIZATIONS else None
