"""Weights out of a GGUF file, dequantised by the `gguf` library and put back into Hugging Face's order."""

from __future__ import annotations

import math

import gguf
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, StoredMatrix, map_rows
from paceline_runtime.gguf_file import GgufFile, GgufTensor
from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.weights import check_shape

__all__ = ["GgufWeights", "check_quantization"]

# llama.cpp's converter reorders the rotated rows of these; for all others it keeps Hugging Face's order
_PERMUTED = frozenset({"llama", "smollm3"})
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights:
    """The tensors of a GGUF file under their Hugging Face names, as float32 (float16 and bfloat16 stay what they are)."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names = gguf.get_tensor_name_map(_architecture(config.architecture), config.num_layers)
        self._data = np.memmap(file.path, mode="r")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one tensor, dequantised."""
        tensor = torch.from_numpy(self._dequantise(self._find(name, shape))).view(shape)
        heads = self._rotated_heads(name)
        return _unpermute(tensor, heads) if heads else tensor

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredMatrix:
        """Return one matrix: in Q4_0's, Q4_1's and Q8_0's groups of 32 as it is, else as `tensor` does."""
        kind, raw = self._raw(self._find(name, shape))
        weight = _as_it_is(kind, raw)
        if weight is None:
            return self.tensor(name, shape)
        heads = self._rotated_heads(name)
        return map_rows(weight, lambda rows: _unpermute(rows, heads)) if heads else weight

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        stored_name = self._names.get_name(name, (".weight", ".bias")) or name
        stored = self._file.tensors.get(stored_name)
        if stored is None:
            raise ModelFormatError(f"{self._file.path}: the weights lack the tensor {stored_name}")
        check_shape(stored.name, stored.shape, shape)
        return stored

    def _rotated_heads(self, name: str) -> int:
        """Return of how many heads the rows are reordered, 0 if they aren't."""
        if self._config.architecture not in _PERMUTED:
            return 0
        if "q_proj" in name:
            return self._config.num_heads
        return self._config.num_kv_heads if "k_proj" in name else 0

    def _dequantise(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        kind, raw = self._raw(tensor)
        try:
            values = gguf.quants.dequantize(raw, kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self._file.path}: quantisation {kind.name} isn't supported ({error})") from error
        # float32 comes as a view of the file, which must not stay open for the weights' sake
        return values if values.flags.writeable else values.copy()

    def _raw(self, tensor: GgufTensor) -> tuple[gguf.GGMLQuantizationType, npt.NDArray[np.uint8]]:
        """Return the tensor's type and its bytes [rows, bytes of a row]."""
        where = f"{self._file.path}: tensor {tensor.name}"
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(f"{where} has the unknown quantisation {tensor.type_id}") from error
        if tensor.shape[-1] % block:
            raise ModelFormatError(f"{where} has rows of {tensor.shape[-1]}, no multiple of {kind.name}'s {block}")
        row = tensor.shape[-1] // block * size
        end = tensor.offset + math.prod(tensor.shape[:-1]) * row
        if end > len(self._data):
            raise ModelFormatError(f"{where} is truncated: it ends {end - len(self._data)} bytes behind the file's end")
        return kind, np.asarray(self._data[tensor.offset : end]).reshape(-1, row)


def check_quantization(file: GgufFile, wanted: str | None) -> None:
    """Raise `UnsupportedModel` unless `wanted` is None, `gguf`, or a type that some of the file's tensors have (`Q4_1`)."""
    if wanted is None or wanted.lower() == "gguf":
        return
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    found = sorted({names.get(tensor.type_id, str(tensor.type_id)) for tensor in file.tensors.values()})
    if wanted.upper() not in found:
        raise UnsupportedModel(f"{file.path} isn't quantised as {wanted!r}: its tensors are {', '.join(found)}")


def _as_it_is(kind: gguf.GGMLQuantizationType, raw: npt.NDArray[np.uint8]) -> StoredMatrix | None:
    """Return a matrix of 16 bits or in groups of 32 from its bytes [rows, bytes of a row], None for another type.

    A group's block is its float16 scale, Q4_1's float16 minimum, then the numbers.
    """
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = torch.from_numpy(raw.copy())  # the file must not stay open for the weights' sake
    if kind.name in _HALVES:
        return data.view(_HALVES[kind.name])
    if kind.name not in ("Q8_0", "Q4_1", "Q4_0"):
        return None
    blocks = data.view(len(data), -1, size)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind.name == "Q8_0":
        return Int8GroupWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scales)
    if kind.name == "Q4_1":
        return Int4Weight(blocks[..., 4:].flatten(1), scales, blocks[..., 2:4].contiguous().view(torch.float16)[..., 0])
    minimums = scales * -8  # its numbers count from -8
    return Int4Weight(blocks[..., 2:].flatten(1), scales, minimums) if minimums.isfinite().all() else None


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rotated rows: it pairs neighbours, Hugging Face pairs the halves of a head."""
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)
