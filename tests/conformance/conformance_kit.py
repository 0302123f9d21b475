"""What the conformance tests share."""

from __future__ import annotations

from dataclasses import dataclass

from serving_process import RuntimeProcess
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from paceline_runtime.token_bytes import TokenBytes


@dataclass
class Served:
    """A server, the model behind it as `transformers` runs it, and its tokenizer."""

    runtime: RuntimeProcess
    model: LlamaForCausalLM
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        return TokenBytes(self.tokenizer).of(token)

    def ids_of(self, tokens: list[str]) -> list[int]:
        """Return the ids of tokens as log-probabilities name them."""
        ids = {self.bytes_of(i): i for i in reversed(range(self.tokenizer.get_vocab_size()))}
        return [ids[bytes_named(token)] for token in tokens]


def bytes_named(token: str) -> bytes:
    """Return the bytes of a token as log-probabilities name it."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()
