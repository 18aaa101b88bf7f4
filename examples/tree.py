"""A Call that creates Calls: word counts of several texts, counted apart and merged by the parent.

    python examples/tree.py

The children need no network: they are created over the container's socket. The parent asks for little, since it holds
what it asked for while it waits.
"""

import os
from collections import Counter

import outerproduct as op

image = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))

TEXTS = [
    "the scheduler decides which node",
    "the agent decides which cpus and which gpus",
    "the runner is the only place that unpickles",
]


def count(text: str) -> Counter[str]:
    return Counter(text.split())


def count_all(client: op.OuterProductClient, image: op.Image, texts: list[str]) -> Counter[str]:
    """Its client is that of the Attempt: what it runs are child Calls."""
    total: Counter[str] = Counter()
    for part in client.map(count, texts, image=image, cpu=1, memory_bytes=128 * 1024**2):
        total += part
    return total


def main() -> None:
    client = op.init()
    run = client.run(fn=count_all, args=(image, TEXTS), image=image, cpu=1, memory_bytes=256 * 1024**2)
    for word, times in run.wait().most_common(3):
        print(f"{times} x {word}")


if __name__ == "__main__":
    main()
