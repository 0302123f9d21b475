"""Rebuild a tokenizer from GGUF metadata, as the model was trained with it. No torch here.

The file holds vocabulary, merges and the *name* of the pre-tokenizer; what each name means is llama.cpp's convention
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp), and an unknown name is refused: a guess would split
numbers or spaces otherwise than the model has learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.gguf_vocabulary import add_special_pieces, read_vocabulary, texts_of
from paceline_runtime.model_errors import ModelFormatError, UnsupportedModel
from paceline_runtime.tokenizer_sentencepiece import build_sentencepiece

__all__ = ["build_tokenizer"]

# Patterns of the models' own tokenizers. The first is GPT-4's, with up to three digits in a piece.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_PATTERN = _CASED_WORDS.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST
_TEKKEN_PATTERN = _CASED_WORDS.replace("SUFFIX", "") + r"|\p{N}" + _REST


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, slots=True)
class _Pre:
    """What a pre-tokenizer's name implies."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False  # a piece that is in the vocabulary is a token, whatever the merges say
    bos: bool = False  # a begin token comes first, where the file says nothing
    nfc: bool = False  # characters are composed first


def _pattern(pattern: str, **options: bool) -> _Pre:
    return _Pre(lambda: _pattern_then_bytes(pattern), **options)


_GPT2, _QWEN2 = _Pre(_byte_level), _pattern(_QWEN2_PATTERN, nfc=True)
_LLAMA3 = _pattern(_LLAMA3_PATTERN, ignore_merges=True, bos=True)
_PRE_TOKENIZERS: dict[str, _Pre] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _Pre(_digits_then_bytes),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _pattern(_LLAMA3_PATTERN),  # Phi-4
    "smaug-bpe": _pattern(_LLAMA3_PATTERN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _pattern(_GPT4O_PATTERN),  # Phi-4-mini
    "tekken": _pattern(_TEKKEN_PATTERN, ignore_merges=True, bos=True),  # Mistral Nemo
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer that the metadata describe. Raises `UnsupportedModel` or `ModelFormatError`."""
    model = file.value("tokenizer.ggml.model", str)
    if model == "llama":
        return build_sentencepiece(file)
    if model != "gpt2":
        raise UnsupportedModel(
            f"{file.path}: tokenizer model {model!r} isn't supported, only 'gpt2' and 'llama' (SentencePiece)"
        )
    name = file.value("tokenizer.ggml.pre", str, "gpt-2")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"{file.path}: pre-tokenizer {name!r} isn't supported, only {', '.join(_PRE_TOKENIZERS)}")
    pre, vocabulary = _PRE_TOKENIZERS[name], read_vocabulary(file)
    tokenizer = Tokenizer(_bpe(file, vocabulary.tokens, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.make()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added())
    add_special_pieces(file, vocabulary.tokens, tokenizer, bos=pre.bos)
    return tokenizer


def _bpe(file: GgufFile, tokens: list[str], *, ignore_merges: bool) -> models.BPE:
    merges = [_pair(merge) for merge in texts_of(file, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return models.BPE(vocabulary, merges, byte_fallback=False, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise ModelFormatError(f"{file.path}: vocabulary and merges don't fit together: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
