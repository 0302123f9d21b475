"""Where weights come from: one protocol, with Hugging Face names, over safetensors folders and random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open

from paceline_kernels.triton_ops.quantised_weights import StoredMatrix
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import ModelFormatError, ModelNotFound
from paceline_runtime.model_json import read_json, shard_names

__all__ = [
    "RandomWeights",
    "SafetensorsWeights",
    "SplitWeights",
    "StoredWeights",
    "WeightSource",
    "check_shape",
]


class WeightSource(Protocol):
    """Gives tensors by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`)."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor on the CPU in its stored dtype. Raises `ModelFormatError` if it is absent or misshapen."""


@runtime_checkable
class StoredWeights(WeightSource, Protocol):
    """A source that also gives matrices as they lie in its files, in fewer bits than float32 where that is how they lie."""

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredMatrix:
        """Return the matrix, as `tensor` does where the stored form is none of `StoredMatrix`."""


class SafetensorsWeights:
    """The `.safetensors` file or files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: _open(folder / name) for name in _file_names(folder)}
        self._where = {key: file for file in self._files.values() for key in file.keys()}  # noqa: SIM118 - no mapping

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor, read from its file."""
        file = self._where.get(name)
        if file is None:
            raise ModelFormatError(f"the weights lack the tensor {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        check_shape(name, tuple(tensor.shape), shape)
        return tensor

    stored = tensor


class SplitWeights:
    """Gives the parts of fused projections under the names of separate ones (Phi-3 stores qkv_proj and gate_up_proj)."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        wide = config.intermediate_size
        self._source = source
        # part → the fused name, its rows in all, and the part's first row
        self._parts = {
            "q_proj": ("qkv_proj", query + 2 * key, 0),
            "k_proj": ("qkv_proj", query + 2 * key, query),
            "v_proj": ("qkv_proj", query + 2 * key, query + key),
            "gate_proj": ("gate_up_proj", 2 * wide, 0),
            "up_proj": ("gate_up_proj", 2 * wide, wide),
        }
        self._last: tuple[str, torch.Tensor] | None = None  # the parts of one are asked for one after the other

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor or one part of a fused one."""
        prefix, _, stem = name.rpartition(".")[0].rpartition(".")
        if stem not in self._parts:
            return self._source.tensor(name, shape)
        fused, rows, first = self._parts[stem]
        whole = self._whole(name.replace(f"{prefix}.{stem}", f"{prefix}.{fused}"), (rows, *shape[1:]))
        return whole[first : first + shape[0]]

    def _whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._source.tensor(name, shape)
        return self._last[1]


class RandomWeights:
    """Weights drawn from a seed, for load tests and benchmarks of shapes whose weights aren't at hand."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return normal numbers of the scale that decoders are initialised with, and ones for norms."""
        if "norm" in name:
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator) * 0.02


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise `ModelFormatError` if a tensor hasn't the shape that the configuration calls for."""
    if found != wanted:
        raise ModelFormatError(f"the tensor {name} has the shape {found}, the configuration calls for {wanted}")


def _file_names(folder: Path) -> list[str]:
    index = read_json(folder / "model.safetensors.index.json")
    if not index:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ModelNotFound(f"{folder} holds no .safetensors file (pickled weights are never loaded)")
        return names
    return shard_names(index)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelNotFound(f"the shard {path} doesn't exist") from error
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path} is no whole safetensors file: {error}") from error
