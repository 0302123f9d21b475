"""A vocabulary out of GGUF metadata: texts, types and scores of tokens, and the special ones. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from paceline_runtime.gguf_file import GgufFile
from paceline_runtime.model_errors import ModelFormatError

__all__ = ["NORMAL", "USER_DEFINED", "Vocabulary", "add_special_pieces", "read_vocabulary", "special_token_ids", "texts_of"]

NORMAL, _CONTROL, USER_DEFINED = 1, 3, 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their ids; `types` are empty if the file has none."""

    tokens: list[str]
    types: list[int]

    def added(self) -> list[AddedToken]:
        """Return the tokens that match as whole texts; control tokens are also left out of decoded text."""
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=bool(self.types))
            if kind in (_CONTROL, USER_DEFINED)
        ]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Return the vocabulary. Raises `ModelFormatError`."""
    tokens = texts_of(file, "tokenizer.ggml.tokens")
    types: list[Any] = file.value("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise ModelFormatError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    return Vocabulary(tokens, types)


def special_token_ids(file: GgufFile, *names: str) -> tuple[int, ...]:
    """Return the ids that the metadata give for `names` (`eos`, `eot`, `bos`), without those that are absent."""
    vocabulary = len(texts_of(file, "tokenizer.ggml.tokens"))
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    ids = [file.value(key, int) for key in keys if key in file.metadata]
    if not all(0 <= token < vocabulary for token in ids):
        raise ModelFormatError(f"{file.path}: a special token's id is outside the vocabulary of {vocabulary}")
    return tuple(dict.fromkeys(ids))


def texts_of(file: GgufFile, key: str) -> list[str]:
    """Return a list of texts. Raises `ModelFormatError`."""
    texts: list[Any] = file.value(key, list)
    if not texts or not isinstance(texts[0], str):  # arrays have one type
        raise ModelFormatError(f"{file.path}: {key} must be a list of texts")
    return texts


def add_special_pieces(file: GgufFile, tokens: list[str], tokenizer: Tokenizer, *, bos: bool) -> None:
    """Put the begin token before a text and the end token behind it where the file wants it (`bos`: if it says nothing)."""
    wanted = {
        "bos": file.value("tokenizer.ggml.add_bos_token", bool, default=bos),
        "eos": file.value("tokenizer.ggml.add_eos_token", bool, default=False),
    }
    pieces = {name: ids[0] for name, on in wanted.items() if on and (ids := special_token_ids(file, name))}
    if not pieces:
        return
    # explicit pieces, since the text form would split a token with spaces in it
    before = [tokens[pieces["bos"]]] if "bos" in pieces else []
    after = [tokens[pieces["eos"]]] if "eos" in pieces else []
    specials = list(dict.fromkeys((tokens[token], token) for token in pieces.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", "$B:1", *after], special_tokens=specials
    )
