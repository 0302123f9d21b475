"""What becomes of a command whose output can't be shown or written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [["--version"], ["plan"], ["simulate", "--lengths", "8,2"], ["simulate", "--lengths", "8,2", "--json"]]


def run(command, **options):
    words = [sys.executable, "-m", "paceline_cli", *command]
    return subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = run(command, stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: nothing more can be written: No space left on device\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_has_left_hears_nothing(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(command, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_without_our_signs_gets_what_it_can_show():
    done = run(["plan"], stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "parameters ? 2 bytes" in done.stdout


def test_a_closed_output_is_no_failure_of_ours():
    done = run(["simulate", "--lengths", "8,2", "--json"], preexec_fn=lambda: os.close(1))
    assert "Traceback" not in done.stderr
