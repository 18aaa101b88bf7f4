"""Output on its way: nothing lost, nothing doubled, bounded; also over restarts and lost connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct_agent import log_spool
from outerproduct_agent.log_shipper import LogShipper
from outerproduct_agent.log_spool import LogSpool

Pieces = list[tuple[int, bytes]]


def nothing() -> None:
    """Nobody to wake."""


async def drain(spool: LogSpool) -> tuple[bytes, int]:
    """All output and what was dropped, as the shipper would ask for it."""
    data, offset = b"", 0
    while (chunk := await spool.chunk_from(offset)) is not None:
        if chunk.last:
            return data, chunk.dropped_bytes
        assert chunk.offset == offset
        data += chunk.data
        offset += len(chunk.data)
    return data, 0


@given(
    pieces=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=20),
    cut=st.integers(0, 20),
)
@settings(max_examples=60)
def test_reading_docker_again_from_the_beginning_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory, pieces: Pieces, cut: int
) -> None:
    path = tmp_path_factory.mktemp("spool") / "log"
    LogSpool(path, "a").fill(iter(pieces[:cut]), nothing)
    spool = LogSpool(path, "a")
    spool.fill(iter(pieces), nothing)
    spool.complete = True
    data, dropped = asyncio.run(drain(spool))
    assert data == b"".join(piece for _, piece in pieces)
    assert dropped == 0


async def test_streams_stay_apart(tmp_path: Path) -> None:
    spool = LogSpool(tmp_path / "log", "a")
    spool.fill(iter([(1, b"out "), (1, b"out "), (2, b"err")]), nothing)
    first = await spool.chunk_from(0)
    assert first is not None
    second = await spool.chunk_from(len(first.data))
    assert second is not None
    assert (first.stream, first.data, second.stream, second.data) == (1, b"out out ", 2, b"err")


async def test_output_beyond_the_limit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_spool, "MAX_SPOOLED_BYTES", 10)
    spool = LogSpool(tmp_path / "log", "a")
    spool.fill(iter([(1, b"0123456"), (1, b"789abc"), (2, b"def")]), nothing)
    spool.complete = True
    assert await drain(spool) == (b"0123456789", 6)


async def ship_until_gone(shipper: LogShipper, path: Path, *, lose_after: int | None = None) -> list[pb.LogChunk]:
    """Plays the scheduler: takes chunks and acknowledges them; optionally the connection breaks once."""
    received: list[pb.LogChunk] = []
    while path.exists():
        queue: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        shipping = asyncio.create_task(shipper.ship(queue.put))
        while path.exists():
            chunk = (await asyncio.wait_for(queue.get(), 10)).log
            if lose_after is not None and len(received) == lose_after:
                lose_after = None
                break
            received.append(chunk)
            shipper.acknowledged(chunk.attempt, chunk.offset + len(chunk.data) + chunk.dropped_bytes)
        shipping.cancel()
        await asyncio.gather(shipping, return_exceptions=True)
    return received


@pytest.mark.parametrize("lose_after", [None, 0, 1, 2])
async def test_a_spool_is_removed_only_when_all_of_it_has_arrived(tmp_path: Path, lose_after: int | None) -> None:
    path = tmp_path / "log"
    spool = LogSpool(path, "a")
    spool.fill(iter([(1, b"one "), (2, b"two "), (1, b"three")]), nothing)
    spool.complete = True
    shipper = LogShipper()
    shipper.add("a", spool)
    received = await ship_until_gone(shipper, path, lose_after=lose_after)
    assert b"".join(chunk.data for chunk in received) == b"one two three"
    assert received[-1].last
