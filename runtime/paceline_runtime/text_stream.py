"""From tokens to the text that a client may see: UTF-8 whole, stop texts never leaked, the end found at the right token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from paceline_core.request import FinishReason
from paceline_runtime.sampling_params import SamplingParams

__all__ = ["StopMatcher", "TextStream", "TokenDecoder", "Tokenizer"]


class TokenDecoder(Protocol):
    """Turns a growing sequence of tokens into text, holding back what isn't a whole character yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return what was held back; nothing more comes."""


class Tokenizer(Protocol):
    """Text to tokens and back, in the API process."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def max_token_chars(self) -> int:
        """Most characters of a text that one token stands for."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of `text`, after what the model wants before every text if asked for."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid bytes become replacement characters."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for by itself, special ones by their name; none for an unknown id."""

    def detokenizer(self) -> TokenDecoder:
        """Return a decoder for one new sequence."""

    @property
    def chat_template(self) -> str:
        """The source of the chat template, empty without one."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a chat as the text that the model was trained on."""


class StopMatcher:
    """Cuts a text at the first of some stop texts, holding back every tail that could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Return what is safe to show after `text` came."""
        if self.hit:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [i for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._longest_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return the tail that was held back: it did not become a stop text."""
        shown, self._held = self._held, ""
        return shown

    def _longest_start(self) -> int:
        """Return the length of the longest tail of the held text with which a stop text begins."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)


class TextStream:
    """One sequence's output as text. `stop_token_ids` holds every token that ends it (end-of-text tokens too)."""

    def __init__(self, decoder: TokenDecoder, params: SamplingParams, stop_token_ids: Iterable[int]) -> None:
        self._decoder = decoder
        self._params = params
        self._stop_ids = frozenset(stop_token_ids)
        self._matcher = StopMatcher(params.stop)
        self.token_ids: list[int] = []
        self.offsets: list[int] = []  # of each token, where in the text the first character is that it completes
        self._decoded = 0
        self._shown = 0
        self.finish_reason: FinishReason | None = None

    @property
    def stopped_by_text(self) -> bool:
        """True if a stop text ended it, which the engine can't know by itself."""
        return self._matcher.hit

    @property
    def stopped_by_token(self) -> bool:
        """True if its last token ended it; that token has no text."""
        by_token = self.finish_reason is FinishReason.STOP and not self._matcher.hit
        return by_token and bool(self.token_ids) and self.token_ids[-1] in self._stop_ids

    @property
    def shown_tokens(self) -> int:
        """How many tokens the text that was shown has: what a stop text cut off isn't told, nor is a stop token."""
        if self.finish_reason is not None and not self._matcher.hit:
            return len(self.token_ids) - self.stopped_by_token
        return bisect_left(self.offsets, self._shown)

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that new tokens add. Tokens after the end are dropped."""
        text = ""
        for token in tokens:
            if self.finish_reason is not None:
                break
            text += self._push_one(token)
        self._shown += len(text)
        return text

    def finish(self, reason: FinishReason) -> str:
        """Mark the end if it isn't known yet, and return the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
        text = self._rest()
        self._shown += len(text)
        return text

    def _rest(self) -> str:
        """Return what was held back; a stop text may still be in it."""
        if self._matcher.hit:
            return ""
        return self._matcher.push(self._decoder.flush()) + self._matcher.flush()

    def _push_one(self, token: int) -> str:
        self.token_ids.append(token)
        self.offsets.append(self._decoded)
        count = len(self.token_ids)
        if token in self._stop_ids and count > self._params.min_tokens:
            self.finish_reason = FinishReason.STOP
            return self._rest()
        text = self._decoder.push((token,))
        self._decoded += len(text)
        if count > self._params.min_tokens:  # before that a stop text is a text like any other
            text = self._matcher.push(text)
        if self._matcher.hit:
            self.finish_reason = FinishReason.STOP
        elif count >= self._params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
            text += self._rest()
        return text
