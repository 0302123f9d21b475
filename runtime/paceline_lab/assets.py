"""The page's files: no build step, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["PAGE", "asset"]

PAGE = "index.html"
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FILES = ("index.html", "lab.css", "lab.js", "controls.js", "picture.js", "live.js")


def asset(name: str) -> tuple[bytes, str] | None:
    """Return a file of the page and its content type, or None if the page has no such file."""
    if name not in _FILES:
        return None
    return (files("paceline_lab") / "web" / name).read_bytes(), _TYPES[name.rpartition(".")[2]]
