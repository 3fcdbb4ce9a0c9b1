"""Memory for the KV cells, brought in by all threads before llama.cpp zeroes it with one.

llama.cpp allocates the cells with malloc and clears them: a page fault every 4 KiB, 1.5 us each in a virtual machine, 0.29 s for
720 MiB. glibc can be told to keep a freed block: so a block of that size is allocated, populated by several threads at once
(MADV_POPULATE_WRITE), freed, and given out again to the next who asks for as much. Elsewhere than on Linux with glibc nothing is done.
"""

import ctypes
import os
import sys
import threading
from typing import Any

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_DEFAULT_TRIM_THRESHOLD, _DEFAULT_MMAP_MAX, _INT_MAX = 128 * 1024, 65_536, 2**31 - 1
# mman.h, Linux 5.14; an older kernel answers EINVAL and nothing is lost
_MADV_POPULATE_WRITE = 23
_PAGE = 4096
_SLICE = 8 * 1024 * 1024
# What the buffers and their alignment take beside the cells.
_SLACK = 4 * 1024 * 1024
MAX_THREADS = 8
WORTH_BYTES = 64 * 1024 * 1024


class WarmHeap:
    """While the block lasts: `with WarmHeap(n_bytes, n_threads): allocate them`."""

    def __init__(self, n_bytes: int, n_threads: int) -> None:
        self._n_bytes, self._n_threads = n_bytes + _SLACK, min(n_threads, MAX_THREADS)
        self._libc = _libc() if n_threads > 1 and n_bytes >= WORTH_BYTES else None

    def __enter__(self) -> None:
        """Populate the block and free it into the heap."""
        libc = self._libc
        if libc is None:
            return
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _INT_MAX)
        block = libc.malloc(self._n_bytes)
        if block:
            self._populate(libc, block)
            libc.free(block)

    def __exit__(self, *_: object) -> None:
        """From here on large blocks are mapped and returned to the system again, as by default."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)

    def _populate(self, libc: Any, block: int) -> None:
        first = -(-block // _PAGE) * _PAGE
        last = (block + self._n_bytes) // _PAGE * _PAGE

        def run(number: int) -> None:
            for start in range(first + number * _SLICE, last, self._n_threads * _SLICE):
                if libc.madvise(start, min(_SLICE, last - start), _MADV_POPULATE_WRITE):
                    return

        threads = [threading.Thread(target=run, args=(number,)) for number in range(self._n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _libc() -> Any:
    if sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
