"""A pod that tells the tuner lies, for `bench.tuner_clock`: the runtime as it ships, with a false observe document.

    python -m bench.tuner_liar doubled|frozen --device clock …   # further arguments are the runtime's

`doubled`: the step-time model that it publishes is twice the truth. `frozen`: after 8 s it answers the same for ever.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from paceline_core.wire import ObserveDocument
from paceline_core.wire import to_json as honest
from paceline_runtime import admin
from paceline_runtime.command import main

_SECONDS = ("constant", "decodeTokens", "prefillTokens", "contextTokens", "prefillAttention")
_HONEST_FOR = 8.0  # seconds from the start of the process: until it is ready, and before the tuner's first decision


class Liar:
    """Stands in for `to_json` on the admin port."""

    def __init__(self, lie: str) -> None:
        self._lie, self._begin = lie, time.monotonic()
        self._last: dict[str, Any] | None = None

    def __call__(self, document: Any) -> Any:
        """Return the document as JSON-ready data, falsified if it is the observe document."""
        if not isinstance(document, ObserveDocument):
            return honest(document)
        if self._lie == "frozen" and self._last is not None and time.monotonic() - self._begin > _HONEST_FOR:
            return self._last
        self._last = data = honest(document)
        if self._lie == "doubled" and (model := data.get("stepModel")):
            data["stepModel"] = model | {name: 2 * model[name] for name in _SECONDS}
        return data


if __name__ == "__main__":
    admin.to_json = Liar(sys.argv.pop(1))  # type: ignore[attr-defined]
    sys.exit(main())
