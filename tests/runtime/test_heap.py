"""Processes' memory: large pages unless somebody wants it otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_runtime.heap import engine_environment, in_large_pages


def test_the_engine_asks_for_large_pages_and_its_threads():
    found = engine_environment({"PATH": "/bin"}, 2)
    large = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert found == {"PATH": "/bin", "OMP_NUM_THREADS": "2", **large}
    assert in_large_pages(large) == large


def test_what_is_set_already_stays():
    found = engine_environment({"OMP_NUM_THREADS": "7", "GLIBC_TUNABLES": "glibc.malloc.check=3"}, 2)
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    assert in_large_pages({"PYTHONMALLOC": "debug"})["PYTHONMALLOC"] == "debug"
    off = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert in_large_pages(off) == off


_FLAGS_OF_A_LARGE_ALLOCATION = """
import ctypes, re
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
at = libc.malloc(1 << 26)
inside = False
for line in open("/proc/self/smaps"):
    if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = int(span[1], 16) <= at < int(span[2], 16)
    elif inside and line.startswith("VmFlags:"):
        print(line)
"""


def _choice():
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "never"


@pytest.mark.skipif(_choice() != "madvise", reason="this kernel gives large pages always, or never")
def test_a_process_gets_them():
    environment = engine_environment(os.environ, 1)
    command = [sys.executable, "-c", _FLAGS_OF_A_LARGE_ALLOCATION]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "hg" in said.split()  # as the kernel calls it: advised to be huge


_RESTARTED = """
import os, sys
from paceline_runtime.heap import restart_in_large_pages
restart_in_large_pages()
print(os.getpid(), os.environ["PYTHONMALLOC"], sys.argv[1:], sys.flags.dev_mode)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")
def test_a_program_starts_anew_once_in_its_place_with_its_arguments():
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONMALLOC", "GLIBC_TUNABLES")}
    command = [sys.executable, "-X", "dev", "-c", _RESTARTED, "--model", "a b"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    assert said == f"{process.pid} malloc ['--model', 'a b'] True\n"
