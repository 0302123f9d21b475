"""Text to token ids and back, for the API process and offline use. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline_runtime.chat_template import ChatTemplate
from paceline_runtime.config_gguf import gguf_architecture
from paceline_runtime.config_hugging_face import config_from_hugging_face
from paceline_runtime.gguf_file import GgufFile, read_gguf
from paceline_runtime.gguf_vocabulary import special_token_ids
from paceline_runtime.json_fields import JsonFields
from paceline_runtime.model_errors import ChatTemplateError, ModelFormatError, ModelNotFound
from paceline_runtime.model_files import ModelKind, locate_model
from paceline_runtime.model_json import read_json
from paceline_runtime.token_bytes import TokenBytes
from paceline_runtime.tokenizer_gguf import build_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]

# what a chat template may name
_CONSTANTS = ("bos_token", "eos_token", "unk_token", "pad_token")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
_REPLACEMENT = "\ufffd"
# Tokens after which unfinished bytes are given out as they are: a UTF-8 character has at most four bytes, so eight tokens
# that complete none aren't one.
_MAX_HELD = 8


class Detokenizer:
    """Turns a growing sequence of tokens into text that never ends inside a character.

    Decodes from the last point where the text was whole: decoding tokens one by one would break characters and the spaces
    that some tokenizers put between tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # since the last whole text but one
        self._given = 0  # of `_ids`, how many the given text holds
        self._given_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that `token_ids` complete; bytes of an unfinished character are kept back."""
        return "".join(self._push(token) for token in token_ids)

    def flush(self) -> str:
        """Return what was kept back (as a replacement character): nothing more will come."""
        text = self._tokenizer.decode(self._ids)[len(self._given_text) :]
        self._ids, self._given, self._given_text = [], 0, ""
        return text

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._given < _MAX_HELD:
            return ""
        new = text[len(self._given_text) :]
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        self._given_text = self._tokenizer.decode(self._ids)
        return new


class Tokenizer:
    """A model's tokenizer, its end-of-text ids and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: tuple[int, ...],
        template: str | None,
        constants: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._template = ChatTemplate(template, constants) if template else None
        self._token_bytes = TokenBytes(backend)
        self.max_token_chars = max(
            map(len, backend.get_vocab()), default=1
        )  # byte-level tokens are written longer, if at all
        self.chat_template = template or ""
        self.eos_token_ids = eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included (the model's own may be larger: it is often padded)."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. `add_special_tokens` puts what the model wants before a text (BOS), if anything."""
        # the batch call lets go of the interpreter, the single one doesn't: a second of text would stop everybody's streams
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid bytes become replacement characters."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for by itself, special ones by their name; none for an unknown id."""
        return self._token_bytes.of(token_id)

    def to_json(self) -> str:
        """Return the tokenizer in the format of `tokenizer.json`."""
        return str(self._backend.to_str())

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one new sequence."""
        return Detokenizer(self._backend)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt for a chat; encode it with `add_special_tokens=False`. Raises `ChatTemplateError`."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use completions instead of chat")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def close(self) -> None:
        """End the template's process."""
        if self._template is not None:
            self._template.close()


def load_tokenizer(uri: str, revision: str | None = None) -> Tokenizer:
    """Return the tokenizer of the model at `uri`. Raises a `ModelError` that says what is missing or unsupported."""
    files = locate_model(uri, revision)
    if files.kind is ModelKind.GGUF:
        return _from_gguf(read_gguf(files.path))
    return _from_folder(files.path)


def _from_gguf(file: GgufFile) -> Tokenizer:
    gguf_architecture(file)  # what can't be run is said first
    backend = build_tokenizer(file)
    template = file.value("tokenizer.chat_template", str, "")
    constants = {
        f"{name}_token": backend.id_to_token(ids[0]) or ""
        for name in ("bos", "eos")
        if (ids := special_token_ids(file, name))
    }
    return Tokenizer(backend, special_token_ids(file, "eos", "eot", "eom"), template or None, constants)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        config_from_hugging_face(read_json(folder / "config.json"))  # what can't be run is said first
        other = next((f" (only {name}, which isn't read)" for name in _OTHER_TOKENIZERS if (folder / name).is_file()), "")
        raise ModelNotFound(f"{folder} holds no tokenizer.json{other}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFormatError(f"tokenizer.json can't be read: {error}") from error
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    constants = {key: _token_text(key, settings[key]) for key in _CONSTANTS if settings.get(key)}
    return Tokenizer(backend, _eos_ids(folder, backend, constants), _template_text(folder, settings), constants)


def _token_text(key: str, token: Any) -> str:
    """Return a special token's text, which is stored plainly or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelFormatError(f"tokenizer_config.json: {key} must be a text or an object with its content")
    return text


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, constants: Mapping[str, str]) -> tuple[int, ...]:
    """Return the end-of-text ids: what generation uses wins over what the model or the tokenizer was configured with."""
    for name in ("generation_config.json", "config.json"):
        ids = JsonFields(read_json(folder / name), name).token_ids("eos_token_id")
        if ids:
            return ids
    token = backend.token_to_id(constants.get("eos_token", ""))
    return () if token is None else (token,)


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: a file of its own (newer models) or a field, plain or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _text_of(path)
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if template is not None and not isinstance(template, str):
        raise ModelFormatError("tokenizer_config.json: chat_template must be a text or a list of named ones")
    return template


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} isn't UTF-8: {error}") from error
