"""The code under test in a process of its own, so that it can load the fake library.

Reads commands from standard input, one a line, and answers each with a pickle: `read OFFER` for one reading, `poll`
for the monitor, `clear UUID`. Takes the root of sysfs as its argument.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from outerproduct_agent.gpu_health import GpuMonitor
from outerproduct_agent.gpus import GpuOffer, read_gpus


def main() -> None:
    sys_root = Path(sys.argv[1])
    monitor = GpuMonitor(sys_root=sys_root)
    for line in sys.stdin:
        answer: object
        match line.split():
            case ["read", offer]:
                answer = read_gpus(offer=GpuOffer.parse(offer), sys_root=sys_root)
            case ["poll"]:
                answer = monitor.poll()
            case ["clear", uuid]:
                answer = monitor.clear(uuid)
            case _:
                raise ValueError(f"no such command: {line!r}")
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    monitor.close()


if __name__ == "__main__":
    main()
