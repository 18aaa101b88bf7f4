"""Data loading by several processes through /dev/shm, which is as large as the Call's memory.

python examples/shared_memory.py
"""

import multiprocessing
import os
from multiprocessing import shared_memory

import outerproduct as op

image = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))

BATCH_BYTES = 16 * 1024**2


def load(name: str, index: int) -> None:
    """Fills one batch, as a worker of a data loader does."""
    batch = shared_memory.SharedMemory(name)
    start = index * BATCH_BYTES
    batch.buf[start : start + BATCH_BYTES] = bytes([index + 1]) * BATCH_BYTES
    batch.close()


def train(batches: int) -> list[int]:
    """Returns the first byte of each batch, as the workers wrote them."""
    fork = multiprocessing.get_context("fork")
    block = shared_memory.SharedMemory(create=True, size=batches * BATCH_BYTES)
    try:
        workers = [fork.Process(target=load, args=(block.name, index)) for index in range(batches)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [block.buf[index * BATCH_BYTES] for index in range(batches)]
    finally:
        block.close()
        block.unlink()


def main() -> None:
    client = op.init()
    run = client.run(fn=train, args=(4,), image=image, cpu=1, memory_bytes=512 * 1024**2)
    print(f"batches: {run.wait()}")


if __name__ == "__main__":
    main()
