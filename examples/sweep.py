"""A hyper-parameter search: one Call for each setting, each on CPUs of its own; more than fit simply wait.

python examples/sweep.py
"""

import itertools
import os
import random

import outerproduct as op

image = op.Image.from_registry(os.environ.get("OUTERPRODUCT_BASE_IMAGE", "python:3.12-slim"))


def train(learning_rate: float, momentum: float, seed: int = 7) -> float:
    """Fits y = 3x + noise by gradient descent and returns the loss."""
    rng = random.Random(seed)
    data = [(x / 50, 3 * x / 50 + rng.gauss(0, 0.05)) for x in range(50)]
    weight = velocity = 0.0
    for _ in range(200):
        gradient = sum(2 * (weight * x - y) * x for x, y in data) / len(data)
        velocity = momentum * velocity - learning_rate * gradient
        weight += velocity
    return sum((weight * x - y) ** 2 for x, y in data) / len(data)


def main() -> None:
    client = op.init()
    settings = list(itertools.product([0.001, 0.01, 0.1], [0.0, 0.9]))
    rates, momenta = zip(*settings, strict=True)
    losses = client.map(train, rates, momenta, image=image, cpu=1, memory_bytes=256 * 1024**2, name="sweep")
    ranked = sorted(zip(losses, settings, strict=True))
    for loss, (rate, momentum) in ranked:
        print(f"loss {loss:.6f}  learning_rate={rate}  momentum={momentum}")
    print(f"best: learning_rate={ranked[0][1][0]} momentum={ranked[0][1][1]}")


if __name__ == "__main__":
    main()
