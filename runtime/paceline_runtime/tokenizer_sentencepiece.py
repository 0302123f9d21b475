"""A SentencePiece vocabulary out of GGUF metadata (Llama 2, Mistral, Phi-3, Gemma), as BPE with bytes to fall back on.

The file has a score for each piece: SentencePiece joins the neighbours whose piece has the best score. The `tokenizers`
library wants the same as a list of merges, best first (https://github.com/huggingface/transformers, convert_slow_tokenizer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.gguf_vocabulary import (
    NORMAL,
    USER_DEFINED,
    Vocabulary,
    add_special_pieces,
    read_vocabulary,
    special_token_ids,
)
from paceline_runtime.model_errors import ModelFormatError

__all__ = ["build_sentencepiece"]

_SPACE = "\u2581"
# Longer pieces (runs of spaces and the like) are 48 characters in real vocabularies; each costs its length in lookups.
_MAX_PIECE = 256


def build_sentencepiece(file: GgufFile) -> Tokenizer:
    """Return the tokenizer that the metadata describe. Raises `ModelFormatError`."""
    vocabulary = read_vocabulary(file)
    scores: list[Any] = file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise ModelFormatError(f"{file.path}: {len(scores)} scores for {len(vocabulary.tokens)} tokens")
    if not vocabulary.types:
        raise ModelFormatError(f"{file.path}: the metadata lacks tokenizer.ggml.token_type")
    tokenizer = Tokenizer(_bpe(file, vocabulary, scores))
    prefixed = file.value("tokenizer.ggml.add_space_prefix", bool, default=True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    tokenizer.add_tokens([token for token in vocabulary.added() if not _made_of_space(token.content)])
    add_special_pieces(file, vocabulary.tokens, tokenizer, bos=True)
    return tokenizer


def _bpe(file: GgufFile, vocabulary: Vocabulary, scores: list[Any]) -> models.BPE:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = special_token_ids(file, "unknown")
    mergeable = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind == NORMAL or (kind == USER_DEFINED and _made_of_space(token))
    }
    merges = sorted(_merges(mergeable), key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    try:
        return models.BPE(
            ids,
            [(left, right) for _, left, right in merges],
            unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFormatError(f"{file.path}: the vocabulary can't be used: {error}") from error


def _merges(scores: Mapping[str, float]) -> Iterator[tuple[float, str, str]]:
    """Yield each pair of pieces that makes a piece, with that piece's score."""
    for piece, score in scores.items():
        for cut in range(1, len(piece) if len(piece) <= _MAX_PIECE else 1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                yield score, left, right


def _made_of_space(token: str) -> bool:
    """Tell whether a piece is nothing but spaces: Gemma's runs of them, which are joined like other pieces."""
    return token.replace(_SPACE, " ").isspace()
