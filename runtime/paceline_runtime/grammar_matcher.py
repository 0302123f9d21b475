"""Grammars in the engine: which tokens may come next in a sequence. Compiled beside the step loop, kept for the next."""

from __future__ import annotations

from collections import OrderedDict

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from paceline_runtime.grammar import GRAMMAR_LIMITS
from paceline_runtime.logs import log_event
from paceline_runtime.model_errors import GrammarError
from paceline_runtime.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "GrammarMatcher"]

_KEPT = 64  # compiled grammars; one takes some 100 kB


class GrammarMatcher:
    """One sequence's place in its grammar. After the grammar's end only an end-of-text token may come."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        shape = 1, (vocabulary + 31) // 32
        self._words: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        ending = np.zeros(shape, np.uint32)
        for token in eos_token_ids:
            ending[0, token >> 5] |= np.uint32(1 << (token & 31))
        self._ending: npt.NDArray[np.int32] = ending.view(np.int32)

    @property
    def ended(self) -> bool:
        """True once nothing but an end-of-text token may come."""
        return self._matcher.is_stopped()

    def mask(self) -> npt.NDArray[np.int32]:
        """Return a bit for each token that may come next, [1, words]; valid until the next call."""
        if self.ended:
            return self._ending
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error():  # a limit of its work was reached: the text ends here, the step doesn't
            self._report()
            return self._ending
        return self._words

    def accept(self, token: int) -> None:
        """`token` is the sequence's next. What comes after the end is of no interest."""
        if not self.ended and not self._matcher.consume_token(token):
            self._report()

    def _report(self) -> None:
        log_event("grammar_given_up", reason=self._matcher.get_error()[:200])


class GrammarCompiler:
    """Makes matchers of grammars for one tokenizer and the tokens that end its model's texts. One thread uses it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = tuple(token for token in eos_token_ids if token < tokenizer.vocab_size)
        if not self._eos:
            raise GrammarError("this model has no end-of-text token, so a grammar's text could never end")
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), eos_token=list(self._eos))
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the start of `grammar`. Raises `GrammarError`."""
        compiled = self._kept.pop(grammar, None) or self._compile(grammar)
        self._kept[grammar] = compiled
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return GrammarMatcher(compiled.deep_copy(), self._tokenizer.vocab_size, self._eos)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        # the first mask builds the lexer, in milliseconds: here, so that no step waits for it
        words = np.zeros((1, (self._tokenizer.vocab_size + 31) // 32), np.int32)
        llguidance.numpy.fill_next_token_bitmask(matcher.deep_copy(), words)
        return matcher
