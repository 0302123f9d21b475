"""The `paceline-runtime` program: its memory comes first, since that is settled when a process starts."""

from __future__ import annotations

from paceline_runtime.heap import restart_in_large_pages

__all__ = ["start"]


def start() -> int:
    """Entry point of `paceline-runtime`; returns the exit code."""
    restart_in_large_pages()
    from paceline_runtime.command import main  # loaded once, not twice

    return main()


if __name__ == "__main__":
    raise SystemExit(start())
