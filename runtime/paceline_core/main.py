"""How every command of ours fails: one line on stderr that says what to do, and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from paceline_core.errors import PacelineError

__all__ = ["INTERRUPTED", "USER_ERROR", "run_command"]

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells expect


def run_command(
    action: Callable[[], object], *, errors: tuple[type[Exception], ...], interrupts: tuple[type[BaseException], ...] = ()
) -> int:
    """Run `action` and return the process's exit code: what it returns if that is an int, else 0.

    A `PacelineError` or one of `errors` becomes one line on stderr and 2, Ctrl-C (or one of `interrupts`) 130; anything else
    is a bug and keeps its traceback.
    """
    interrupted: tuple[type[BaseException], ...] = (KeyboardInterrupt, *interrupts)
    expected: tuple[type[Exception], ...] = (PacelineError, *errors)
    try:
        result = action()
    except interrupted:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except expected as error:
        # click's errors put the option that they are about into format_message, not into str()
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        print("error:", " ".join(text.split()), file=sys.stderr)
        return USER_ERROR
    return result if isinstance(result, int) else 0
