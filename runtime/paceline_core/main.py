"""How every command of ours fails: one line on stderr that says what to do, and exit code 2."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

from paceline_core.errors import PacelineError

__all__ = ["INTERRUPTED", "READER_LEFT", "USER_ERROR", "run_command"]

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells expect
READER_LEFT = 1  # as click says it
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_command(
    action: Callable[[], object], *, errors: tuple[type[Exception], ...], interrupts: tuple[type[BaseException], ...] = ()
) -> int:
    """Run `action` and return the process's exit code: what it returns if that is an int, else 0.

    A `PacelineError`, one of `errors` or a full disk becomes one line on stderr and 2, Ctrl-C (or one of `interrupts`) 130,
    a reader that has left (`| head`) 1 without a word; anything else is a bug and keeps its traceback. Signs that the
    terminal's encoding doesn't have are shown as `?`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _code_of(action, errors, interrupts)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_FULL):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left would fail again at exit
        if error.errno == errno.EPIPE:
            return READER_LEFT
        print("error: nothing more can be written:", error.strerror, file=sys.stderr)
        return USER_ERROR
    return code


def _code_of(
    action: Callable[[], object], errors: tuple[type[Exception], ...], interrupts: tuple[type[BaseException], ...]
) -> int:
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
