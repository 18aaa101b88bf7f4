"""What a user's type checker sees; read by mypy in test_typing.py, never run."""

from __future__ import annotations

from typing import reveal_type

import outerproduct as op

client = op.init()
image = op.Image.from_registry("python:3.12-slim")


def train(steps: int, name: str = "") -> dict[str, float]:
    return {name: float(steps)}


async def evaluate(x: float) -> list[float]:
    return [x]


def hosted_style(client: op.OuterProductClient, x: int) -> int:
    return x


def blocking() -> None:
    run = client.run(fn=train, args=(3,), image=image, cpu=8, gpu=1, gpu_type="A100-80GB")
    reveal_type(run)
    reveal_type(run.wait())
    reveal_type(run.wait(timeout=5))
    reveal_type(client.run(fn=evaluate, args=(1.0,), image=image).wait())
    reveal_type(client.run(fn=hosted_style, args=(1,), image=image).refresh())
    reveal_type(client.map(train, [1, 2], image=image))
    reveal_type(client.map(evaluate, [1.0], image=image))
    reveal_type(client.get_run("id"))
    reveal_type(client.list_nodes())


async def awaited() -> None:
    run = await client.run.aio(fn=train, args=(3,), image=image)
    reveal_type(await run.wait.aio())
    reveal_type([value async for value in client.map.aio(evaluate, [1.0], image=image)])
    reveal_type(await client.list_calls("runs/x"))
    if isinstance(run, op.Run):
        reveal_type(await run.calls())
        reveal_type(run.refresh().root_call)
