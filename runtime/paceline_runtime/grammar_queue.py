"""Sequences that wait for their grammar: compiled on a thread, so that no step waits for a schema or a tokenizer."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import zmq

from paceline_runtime.logs import log_event
from paceline_runtime.messages import AddSequence, GrammarsReady, encode
from paceline_runtime.model_errors import GrammarError, ModelError
from paceline_runtime.settings import EngineSettings

if TYPE_CHECKING:
    from paceline_runtime.engine import ModelBackend
    from paceline_runtime.grammar_matcher import GrammarCompiler, GrammarMatcher

__all__ = ["GrammarQueue", "open_grammars"]

_WAKE = "inproc://grammars"


def open_grammars(settings: EngineSettings, backend: ModelBackend, inbox: zmq.Socket[bytes]) -> GrammarQueue:
    """Return the queue of an engine that reads `inbox`."""
    inbox.bind(_WAKE)
    return GrammarQueue(settings, backend.eos_token_ids, inbox.context)


class GrammarQueue:
    """Used by the engine's loop; its one thread compiles, in order, and wakes the loop by a message in its inbox."""

    def __init__(
        self, settings: EngineSettings, eos_token_ids: tuple[int, ...], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._settings = settings
        self._eos = eos_token_ids
        self._context = context
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, AddSequence] = {}
        self._done: SimpleQueue[tuple[int, GrammarMatcher | GrammarError]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "grammars", self._connect)

    def put(self, message: AddSequence) -> None:
        """Compile the grammar of a sequence."""
        self._waiting[message.seq_id] = message
        self._thread.submit(self._compile, message.seq_id, message.params.grammar or "")

    def drop(self, seq_id: int) -> bool:
        """Forget a sequence; False if it doesn't wait here."""
        return self._waiting.pop(seq_id, None) is not None

    def take(self) -> list[tuple[AddSequence, GrammarMatcher | GrammarError]]:
        """Return the sequences that needn't wait any more, with what came of their grammars."""
        taken: list[tuple[AddSequence, GrammarMatcher | GrammarError]] = []
        while True:
            try:
                seq_id, matcher = self._done.get_nowait()
            except Empty:
                return taken
            if (message := self._waiting.pop(seq_id, None)) is not None:
                taken.append((message, matcher))

    def _connect(self) -> None:
        self._wake = self._context.socket(zmq.PUSH)  # of the thread, as a socket must be
        self._wake.connect(_WAKE)

    def _compile(self, seq_id: int, grammar: str) -> None:
        try:
            self._compiler = self._compiler or self._make_compiler()
            found: GrammarMatcher | GrammarError = self._compiler.matcher(grammar)
        except ModelError as error:
            found = error if isinstance(error, GrammarError) else GrammarError(str(error))
        except Exception as error:  # noqa: BLE001  # the library fails as it likes, and its client waits for an answer
            log_event("grammar_failed", level=logging.ERROR, error=error)
            found = GrammarError(f"the grammar library failed on it ({type(error).__name__}); the server's log says why")
        self._done.put((seq_id, found))
        self._wake.send(encode(GrammarsReady()))

    def _make_compiler(self) -> GrammarCompiler:
        from paceline_runtime.grammar_matcher import GrammarCompiler
        from paceline_runtime.tokenizer import load_tokenizer

        assert self._settings.model is not None, "only a model follows grammars"
        return GrammarCompiler(load_tokenizer(self._settings.model, self._settings.revision), self._eos)
