"""The page's files: no build step, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["CONTENT_SECURITY_POLICY", "PAGE", "asset", "live_document"]

PAGE = "index.html"
# bars have their lengths in style attributes
CONTENT_SECURITY_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FILES = ("index.html", "lab.css", "lab.js", "controls.js", "picture.js", "live.js")


def asset(name: str) -> tuple[bytes, str] | None:
    """Return a file of the page and its content type, or None if the page has no such file."""
    if name not in _FILES:
        return None
    return (files("paceline_lab") / "web" / name).read_bytes(), _TYPES[name.rpartition(".")[2]]


def live_document(target: str, *, needs_token: bool, prefix: str, scenarios: bool) -> dict[str, object]:
    """Return the answer of `api/live`.

    It says whom the page watches (empty: nobody), whether the reader must give the admin token, where the timeline and the
    observations are (`prefix/timeline`, `prefix/observe`), and whether scenarios can be played here.
    """
    return {"target": target, "needsToken": needs_token, "prefix": prefix, "scenarios": scenarios}
