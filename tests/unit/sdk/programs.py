"""What users' modules look like: functions that go by name, with and without their client."""

from __future__ import annotations

import outerproduct as op


def add(a: int, b: int = 1) -> int:
    return a + b


def double(x: int) -> int:
    return 2 * x


def fail_on_three(x: int) -> int:
    if x == 3:
        raise ValueError("three")
    return x


def annotated(first: op.OuterProductClient, x: int) -> int:
    return x


def named_client(client, x):  # type: ignore[no-untyped-def]
    return x


def named_runtime(runtime, x):  # type: ignore[no-untyped-def]
    return x


def hosted_style(handle: object, x: int) -> int:
    return x


async def asynchronous(x: int) -> int:
    return x


class Model:
    """A class whose methods are called remotely."""

    @staticmethod
    def train(x: int) -> int:
        return x

    def predict(self, x: int) -> int:
        return x
