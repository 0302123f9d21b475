"""The process that renders a chat template; run by path, so that it loads jinja2 and nothing of ours.

A template comes with the model and isn't to be trusted. The sandbox keeps it from reaching Python; this process keeps it
from taking time and memory: the kernel ends it at its CPU and address-space limits, whatever the template is doing.

Lines of JSON: first `{"template", "max_chars", "cpu_seconds", "max_bytes"}`, then a context per request; each is answered by
`{"text": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _TooLong(Exception):
    """The template has said more than `max_chars`."""


def main() -> None:
    """Answer requests until stdin ends."""
    setup = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (setup["max_bytes"], setup["max_bytes"]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    template: jinja2.Template | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])  # CPU time: a busy machine doesn't count
        try:
            template = template or _environment().from_string(setup["template"])
            answer = {"text": _render(template, json.loads(line), setup["max_chars"])}
        except _TooLong:
            answer = {"error": f"it wrote more than {setup['max_chars']} characters"}
        except MemoryError:
            answer = {"error": f"it took more than {setup['max_bytes'] >> 20} MiB of memory"}
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the caller reports it
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _render(template: jinja2.Template, context: Mapping[str, Any], max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            raise _TooLong
    return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes for HTML


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


if __name__ == "__main__":
    main()
