"""The engine's memory: large pages unless somebody wants it otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_runtime.heap import engine_environment


def test_the_engine_asks_for_large_pages_and_its_threads():
    found = engine_environment({"PATH": "/bin"}, 2)
    assert found == {"PATH": "/bin", "OMP_NUM_THREADS": "2", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_what_is_set_already_stays():
    found = engine_environment({"OMP_NUM_THREADS": "7", "GLIBC_TUNABLES": "glibc.malloc.check=3"}, 2)
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    off = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert engine_environment(off, 2)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


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
