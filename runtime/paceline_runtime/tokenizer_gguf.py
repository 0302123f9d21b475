"""Rebuild a tokenizer from GGUF metadata, as the model was trained with it. No torch here.

The file holds vocabulary, merges and the *name* of the pre-tokenizer; what each name means is llama.cpp's convention
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp), and an unknown name is refused: a guess would split
numbers or spaces otherwise than the model has learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel

__all__ = ["build_tokenizer", "special_token_ids"]

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_bytes,
    "llama-bpe": lambda: _pattern_then_bytes(_LLAMA3_PATTERN),
    "llama3": lambda: _pattern_then_bytes(_LLAMA3_PATTERN),
    "qwen2": lambda: _pattern_then_bytes(_QWEN2_PATTERN),
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer that the metadata describe. Raises `UnsupportedModel` or `ModelFormatError`."""
    model = file.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedModel(f"{file.path}: tokenizer model {model!r} isn't supported, only byte-level BPE ('gpt2')")
    pre = file.value("tokenizer.ggml.pre", str, "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(f"{file.path}: pre-tokenizer {pre!r} isn't supported, only {known}")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(file, tokens, ignore_merges=pre in ("llama-bpe", "llama3")))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(file, tokens))
    _add_bos(file, tokens, tokenizer)
    return tokenizer


def special_token_ids(file: GgufFile, *names: str) -> tuple[int, ...]:
    """Return the ids that the metadata give for `names` (`eos`, `eot`, `bos`), without those that are absent."""
    vocabulary = len(_texts(file, "tokenizer.ggml.tokens"))
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    ids = [file.value(key, int) for key in keys if key in file.metadata]
    if not all(0 <= token < vocabulary for token in ids):
        raise ModelFormatError(f"{file.path}: a special token's id is outside the vocabulary of {vocabulary}")
    return tuple(dict.fromkeys(ids))


def _texts(file: GgufFile, key: str) -> list[str]:
    texts: list[Any] = file.value(key, list)
    if not texts or not isinstance(texts[0], str):  # arrays have one type
        raise ModelFormatError(f"{file.path}: {key} must be a list of texts")
    return texts


def _bpe(file: GgufFile, tokens: list[str], *, ignore_merges: bool) -> models.BPE:
    merges = [_pair(merge) for merge in _texts(file, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return models.BPE(vocabulary, merges, byte_fallback=False, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise ModelFormatError(f"{file.path}: vocabulary and merges don't fit together: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    """Return the tokens that match as whole texts; control tokens are also left out of decoded text."""
    types: list[Any] = file.value("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise ModelFormatError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=bool(types))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _add_bos(file: GgufFile, tokens: list[str], tokenizer: Tokenizer) -> None:
    bos = special_token_ids(file, "bos")
    wanted = file.value("tokenizer.ggml.add_bos_token", bool, default=False)
    if bos and wanted:
        text = tokens[bos[0]]
        # an explicit piece, since the text form would split a token with spaces in it
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", "$B:1"], special_tokens=[(text, bos[0])]
        )
