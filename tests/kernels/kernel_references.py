"""What the ops mean, written plainly in float64 numpy, one token at a time."""

import numpy as np
import torch

# absolute and relative error of one op against float64
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


def wide(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor's values in float64."""
    return tensor.detach().double().cpu().numpy().copy()


def assert_close(got: torch.Tensor, expected: np.ndarray) -> None:
    tolerance = TOLERANCE[got.dtype]
    np.testing.assert_allclose(wide(got), expected, rtol=tolerance, atol=tolerance)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate / (1 + np.exp(-gate)) * up


def gelu_tanh_mul(gate_up: np.ndarray) -> np.ndarray:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up


def rotate(vector: np.ndarray, position: int, frequencies: np.ndarray) -> np.ndarray:
    """Rotate one head [D] at one position: the complex plane of each pair (i, i + D/2)."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * frequencies)
    return np.concatenate([turned.real, turned.imag])


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, soft_cap=None) -> np.ndarray:
    """Attention of one query [D] over keys and values [c, D]."""
    scores = keys @ query * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def paged_attention(queries, kv_cache, spans, block_size, scale, window=None, soft_cap=None) -> np.ndarray:
    """Attention of every row of `spans`, token by token and head by head, [T, H·D]."""
    num_heads, num_kv_heads = queries.shape[1], kv_cache.shape[3]
    rows, row = np.empty(queries.shape), 0
    for span in spans:
        for position in range(span.start, span.context):
            seen = range(0 if window is None else max(0, position + 1 - window), position + 1)
            places = [(span.blocks[p // block_size], p % block_size) for p in seen]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = np.array([kv_cache[block, slot, 0, kv_head] for block, slot in places])
                values = np.array([kv_cache[block, slot, 1, kv_head] for block, slot in places])
                rows[row, head] = attend(queries[row, head], keys, values, scale, soft_cap)
            row += 1
    return rows.reshape(len(rows), -1)
