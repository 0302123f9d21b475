"""The kernels: one module per op, with a torch reference that defines it; ops dispatch by the device of their tensors.

Shapes in docstrings use T tokens of a step, H query heads, K key/value heads (H a multiple of K), D head size, B blocks of
S slots each, I the feed-forward width, V the vocabulary. A layer's KV cache is `[B, S, 2, K, D]`: one row per token holds
its keys and its values, so that a token is written, and a block gathered, with one copy.
"""

from paceline_kernels.attention import paged_attention
from paceline_kernels.attention_batch import (
    MAX_GROUP_SLOTS,
    AttentionBatch,
    AttentionLayout,
    AttentionPlanner,
    DecodeGroup,
    Gather,
    PrefillSegment,
    SequenceSpan,
)
from paceline_kernels.causal_masks import MASK_ROWS
from paceline_kernels.device_sampling import SamplingColumns, sampling_columns
from paceline_kernels.dispatch import KERNELS, Op, kernels_in_use, use_kernels
from paceline_kernels.linear import Linear
from paceline_kernels.norm import add_rms_norm, rms_norm
from paceline_kernels.rope import RopeRows, rope_and_cache, rope_rows
from paceline_kernels.sampling import RowSampling, sample
from paceline_kernels.silu import gelu_tanh_mul, silu_mul

__all__ = [
    "KERNELS",
    "MASK_ROWS",
    "MAX_GROUP_SLOTS",
    "AttentionBatch",
    "AttentionLayout",
    "AttentionPlanner",
    "DecodeGroup",
    "Gather",
    "Linear",
    "Op",
    "PrefillSegment",
    "RopeRows",
    "RowSampling",
    "SamplingColumns",
    "SequenceSpan",
    "add_rms_norm",
    "gelu_tanh_mul",
    "kernels_in_use",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "rope_rows",
    "sample",
    "sampling_columns",
    "silu_mul",
    "use_kernels",
]
