"""Every command of docs/batching.md runs, and prints what the page says it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline_cli.__main__ import cli

PAGE = Path(__file__).parents[2] / "docs" / "batching.md"


def examples() -> list[tuple[str, list[str]]]:
    """Return each command with the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ paceline "):
                found.append((line.removeprefix("$ paceline "), []))
            elif line.strip():
                found[-1][1].append(line)
    return found


def cases() -> list[object]:
    """Return the examples; the picture takes eighteen replays, and its code is tested elsewhere."""
    return [
        pytest.param(command, shown, id=command[:40], marks=[pytest.mark.slow] if "--plot" in command else [])
        for command, shown in examples()
    ]


@pytest.mark.parametrize(("command", "shown"), cases())
def test_the_page_shows_what_the_command_prints(command, shown, tmp_path, monkeypatch):
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    if "--generate" in arguments:
        arguments += ["--workers", "1"]
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "80"})
    printed = [*result.output.splitlines(), f"error: {result.exception}"]
    words = [line.split() for line in printed]
    missing = [line for line in shown if line.split() not in words]
    assert not missing, result.output


def test_the_page_has_examples():
    assert len(examples()) > 12
    assert sum(len(shown) for _, shown in examples()) > 40
