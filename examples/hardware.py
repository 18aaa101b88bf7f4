"""What a function sees of the hardware it asked for.

Run it against `outerproduct up` (or any scheduler that OUTERPRODUCT_BASE_URL and OUTERPRODUCT_API_KEY name):

    python examples/hardware.py

The function is in a module of its own, so it goes by name and the image may have another Python than this machine.
"""

import os

from inside import look_around

import outerproduct as op

image = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))

CPUS = 1
MEMORY_BYTES = 512 * 1024**2


def main() -> None:
    client = op.init()
    print("Nodes:")
    for node in client.list_nodes():
        print(f"  {node}")
    run = client.run(fn=look_around, args=("Hello",), image=image, cpu=CPUS, memory_bytes=MEMORY_BYTES)
    print(f"Run:   {run.name}")
    seen = run.wait()
    print(f"{'':14}{'asked for':>14}   seen inside")
    asked = {"cpu ids": CPUS, "memory limit": MEMORY_BYTES, "/dev/shm": MEMORY_BYTES, "GPUs": 0}
    for name, value in asked.items():
        print(f"{name:14}{value:>14,}   {seen[name]}")
    print(f"{'result':14}{'':>14}   {seen['greeting']}")


if __name__ == "__main__":
    main()
