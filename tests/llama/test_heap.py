"""Memory that is brought in before it is asked for: the next large block is the same one, and all is as before afterwards."""

import ctypes
import subprocess
import sys

import pytest

from runner.llama.heap import WORTH_BYTES, WarmHeap

# In a process of its own: the test's heap is not the place to try how malloc behaves.
SCRIPT = """
import ctypes, resource, sys
from runner.llama.heap import WarmHeap, _libc

def n_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def touch(n):
    libc = _libc()
    before = n_faults()
    block = libc.malloc(n)
    ctypes.memset(block, 0, n)
    libc.free(block)
    return n_faults() - before

n = 200 * 2**20
cold = touch(n)
with WarmHeap(n, 4):
    warm = touch(n)
after = touch(n)
rss = int(open("/proc/self/statm").read().split()[1]) * 4096
print(cold > 40_000, warm < 1_000, after > 40_000 or after < 1_000, rss < n // 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_the_cells_find_their_pages_there_and_the_memory_goes_back_when_they_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True"] * 4


@pytest.mark.parametrize(("n_bytes", "n_threads"), [(WORTH_BYTES - 1, 4), (WORTH_BYTES, 1), (0, 8)])
def test_little_memory_or_one_thread_is_left_to_llama_cpp(n_bytes: int, n_threads: int) -> None:
    assert WarmHeap(n_bytes, n_threads)._libc is None


def test_a_kernel_that_cannot_populate_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.llama.heap._MADV_POPULATE_WRITE", 9999)
    with WarmHeap(WORTH_BYTES, 2):
        assert ctypes.create_string_buffer(10).raw == bytes(10)
