"""Blobs are whole or not there; logs take repeats, bounds and crashes."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outerproduct_scheduler import logs as logs_module
from outerproduct_scheduler.blobs import BlobStore
from outerproduct_scheduler.errors import InvalidArgument, NotFound
from outerproduct_scheduler.logs import LogStore

ATTEMPT = f"runs/{uuid.UUID(int=1)}/calls/0/attempts/1"


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(store: BlobStore, sha256: str, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in store.read(sha256, offset)])


async def test_a_blob_comes_back_as_it_went_in(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    sha256 = hashlib.sha256(b"abcdef").hexdigest()
    await store.store(sha256, 6, chunks(b"abc", b"def"))
    assert store.has(sha256, 6)
    assert not store.has(sha256, 7)
    assert await content(store, sha256) == b"abcdef"
    assert await content(store, sha256, offset=4) == b"ef"


@pytest.mark.parametrize("parts", [(b"other!",), (b"abc",), (b"abcdefg",)])
async def test_content_that_is_not_what_was_announced_leaves_nothing(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    store = BlobStore(tmp_path)
    sha256 = hashlib.sha256(b"abcdef").hexdigest()
    with pytest.raises(InvalidArgument):
        await store.store(sha256, 6, chunks(*parts))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(NotFound):
        await content(store, sha256)


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "0" * 63, ""])
def test_what_is_no_digest_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        BlobStore(tmp_path).path(name)


async def output(store: LogStore, offset: int = 0) -> list[tuple[int, bytes, int]]:
    return [(p.stream, p.data, p.dropped_bytes) async for p in store.read(ATTEMPT, offset) if p.data or p.dropped_bytes]


async def test_output_that_is_sent_again_is_stored_once(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    assert await store.append(ATTEMPT, 1, 0, b"one ", 0, False) == 4
    assert await store.append(ATTEMPT, 1, 0, b"one two ", 0, False) == 8
    assert await store.append(ATTEMPT, 2, 4, b"two ", 0, False) == 8
    assert await store.append(ATTEMPT, 2, 8, b"three", 0, True) == 13
    assert b"".join(data for _, data, _ in await output(store)) == b"one two three"
    assert await store.ended(ATTEMPT)


async def test_a_restarted_store_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    await LogStore(tmp_path).append(ATTEMPT, 1, 0, b"before ", 0, False)
    [path] = tmp_path.rglob("*.log")
    with path.open("ab") as file:
        file.write(b"\x01\x00\x00")  # A record that a crash has cut off.
    store = LogStore(tmp_path)
    assert await store.append(ATTEMPT, 1, 0, b"before after", 0, False) == 12
    assert b"".join(data for _, data, _ in await output(store)) == b"before after"


async def test_output_beyond_the_limit_is_counted_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "MAX_STORED_BYTES", 10)
    store = LogStore(tmp_path)
    await store.append(ATTEMPT, 1, 0, b"0123456789abc", 0, False)
    assert await store.append(ATTEMPT, 1, 13, b"def", 0, True) == 16
    pieces = await output(store)
    assert pieces[0] == (1, b"0123456789", 0)
    assert pieces[-1][2] == 6
