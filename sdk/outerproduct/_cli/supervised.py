"""Runs another package's `__main__` in a process that ends with its parent: what `up` starts.

`python -m outerproduct._cli.supervised PARENT_PID MODULE ARGUMENT...`. Without it a `kill -9` of `up` would leave a
scheduler and an agent behind that nobody supervises. It leaves everything else to the module that it runs.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends this process when its parent has died."""


def main() -> None:
    """Never returns before the module has ended."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request was made; then no signal comes.
    if os.getppid() != parent:
        sys.exit(f"{module}: the process {parent} that started this one has ended")
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
