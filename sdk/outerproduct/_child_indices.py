"""Counts the child Calls of the Attempt that this program runs in."""

from __future__ import annotations

import fcntl
import os
import threading

_INDEX_BYTES = 8


class ChildIndices:
    """The next child index, counted once over all threads and all processes that the function forks.

    The count is in a file without a name (memfd_create(2)), which forked processes share. Its lock is the process's
    (fcntl(2), F_SETLKW) and ends with it, so threads need one more.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("outerproduct-child-index")
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def claim(self) -> int:
        """The next index, given to nobody else."""
        if self._pid != os.getpid():
            # The lock may have been held by a thread that does not exist here.
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                index = int.from_bytes(os.pread(self._file, _INDEX_BYTES, 0), "big")
                os.pwrite(self._file, (index + 1).to_bytes(_INDEX_BYTES, "big"), 0)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        return index
