"""Messages become a prompt by the model's own template, in a process with hard limits. No torch here."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_runtime.model_errors import ChatTemplateError

__all__ = ["ChatTemplate"]

_WORKER = Path(__file__).with_name("chat_template_worker.py")
_MAX_CHARS = 4 * 1024 * 1024  # a million tokens of English
_CPU_SECONDS = 2.0  # a real template takes about a millisecond
_MAX_BYTES = 512 * 1024 * 1024


class ChatTemplate:
    """A model's chat template. Its process starts with the first use and again after a template broke its limits.

    `constants` (`bos_token`, `eos_token`) are visible to the template beside the messages. Thread-safe.
    """

    def __init__(
        self,
        source: str,
        constants: Mapping[str, str],
        *,
        max_chars: int = _MAX_CHARS,
        cpu_seconds: float = _CPU_SECONDS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        limits = {"max_chars": max_chars, "cpu_seconds": cpu_seconds, "max_bytes": max_bytes}
        self._setup = json.dumps({"template": source, **limits})
        self._cpu_seconds = cpu_seconds
        self._constants = dict(constants)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text; it holds its special tokens already, so encode it without adding more.

        Raises `ChatTemplateError` if the template refuses the messages, is broken, or breaks a limit.
        """
        context = {**self._constants, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        if tools:
            context["tools"] = list(tools)
        with self._lock:
            answer = self._ask(json.dumps(context))
        if "error" in answer:
            raise ChatTemplateError(f"the chat template failed: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._end()
            raise ChatTemplateError(
                f"the chat template was stopped: it took more than {self._cpu_seconds:g} s or its memory"
            )
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        # -I: neither the environment nor the working directory adds code to what reads an untrusted template
        command = [sys.executable, "-I", str(_WORKER)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
        self._stop = weakref.finalize(self, _end_process, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(self._setup + "\n")
        return self._process

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None


def _end_process(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
