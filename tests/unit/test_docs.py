"""The documentation's commands exist, with the options that it gives them; its links lead somewhere."""

import re
import shlex
from pathlib import Path

import click
import pytest

from paceline_cli.__main__ import cli
from paceline_runtime.command import cli as runtime_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def commands_of(page):
    """Yield each command of a page's console blocks as words, without prompts, comments, pipes and assignments."""
    for block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith("$ "):
                continue
            lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;<>"):
                    if words:
                        yield words
                    words = []
                elif words or not re.match(r"^[A-Z_]+=", word):
                    words.append(word)


COMMANDS = [(page.name, words) for page in PAGES for words in commands_of(page)]


def test_there_are_commands():
    assert {words[0] for _, words in COMMANDS} >= {"make", "paceline", "paceline-runtime", "kubectl", "helm"}


@pytest.mark.parametrize(("page", "words"), [c for c in COMMANDS if c[1][0] == "make"], ids=str)
def test_make_targets_exist(page, words):
    targets = [word for word in words[1:] if "=" not in word]
    assert set(targets) <= TARGETS, page


@pytest.mark.parametrize(
    ("page", "words"), [c for c in COMMANDS if c[1][0] in ("paceline", "paceline-runtime")], ids=lambda v: str(v)[:70]
)
def test_options_exist(page, words):
    command = cli if words[0] == "paceline" else runtime_command
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"{page}: no command {rest[0]!r} in {' '.join(words)}"
        command, rest = found, rest[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    known |= {"--help", "-h", "--version"}
    used = {word.partition("=")[0] for word in rest if re.match(r"^--?[a-z]", word)}
    assert used <= known, f"{page}: {used - known} in {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _ in LINK.findall(page.read_text()):
        if not re.match(r"^[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
