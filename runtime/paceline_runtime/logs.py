"""Structured log lines: one per important event, as `key=value` or JSON. Prompts and outputs are never logged.

Lines go to stdout, so that stderr holds nothing but the one line of a fatal error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

__all__ = ["LOG_FORMATS", "log_event", "set_up_logging"]

LOG_FORMATS = ("text", "json")
_LOGGER = logging.getLogger("paceline_runtime")  # the parent of every module's own


def set_up_logging(style: str, process: str) -> None:
    """Send Paceline's lines (and warnings of libraries) to stdout in `style` (one of `LOG_FORMATS`)."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(style, process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(logging.INFO)


def log_event(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Write one line: the event's name and its fields; `error` adds its traceback."""
    _LOGGER.log(level, event, exc_info=error, extra={"fields": fields})


class _Formatter(logging.Formatter):
    def __init__(self, style: str, process: str) -> None:
        super().__init__()
        self._as_json = style == "json"
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "process": self._process, "event": record.getMessage()}
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps(line, default=str)
        return " ".join(f"{key}={_text(value)}" for key, value in line.items())


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n') else text
