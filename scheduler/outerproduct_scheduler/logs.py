"""Output of Attempts: one file each, appended as it comes, read from any position, bounded in size.

A record is a header (stream, length, bytes dropped before it) and the data. The agent numbers its output in bytes and
repeats what was not acknowledged; what is here already is passed over.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from outerproduct_scheduler import names

MAX_STORED_BYTES = 64 * 1024**2
"""Per Attempt. Ten thousand Attempts that print without end still fit on a disk; output beyond it is counted."""
MAX_PIECE_BYTES = 1024**2

_HEADER = struct.Struct(">BIQ")
_END = 0
"""Stream number of the record that says that nothing follows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of stored output and the position behind it."""

    stream: int
    data: bytes
    dropped_bytes: int
    next_offset: int


@dataclass(slots=True)
class _Log:
    """What is known of one file that is being written or followed."""

    received: int = 0
    """Bytes of the Attempt's output that have come, dropped ones included."""
    stored: int = 0
    dropped: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class LogStore:
    """Logs below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, _Log] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, attempt: str) -> Path:
        key, number = names.parse_attempt(attempt)
        return self._folder / key.run_id[:2] / key.run_id / f"{key.call_id}-{number}.log"

    async def append(  # noqa: PLR0917 - the fields of one chunk
        self, attempt: str, stream: int, offset: int, data: bytes, dropped: int, last: bool
    ) -> int:
        """Stores what is new of a piece; the position up to which everything is here."""
        log = await self._log(attempt)
        if offset + dropped + len(data) > log.received and not log.ended:
            new_dropped = max(0, min(dropped, offset + dropped - log.received))
            new = data[max(0, log.received - offset - dropped) :]
            log.received = offset + dropped + len(data)
            room = max(0, MAX_STORED_BYTES - log.stored)
            kept = new[:room]
            log.dropped += new_dropped
            if kept:
                await asyncio.to_thread(_write, self._path(attempt), _record(stream, kept, log.dropped))
                log.stored += len(kept)
                log.dropped = 0
            log.dropped += len(new) - len(kept)
        if last and not log.ended:
            await asyncio.to_thread(_write, self._path(attempt), _record(_END, b"", log.dropped))
            log.ended = True
        log.changed.set()
        log.changed = asyncio.Event()
        return log.received

    def forget(self, attempt: str) -> None:
        """Frees the memory of a log that gets no more; its followers are woken."""
        log = self._logs.pop(attempt, None)
        if log:
            log.changed.set()

    async def read(self, attempt: str, offset: int) -> AsyncIterator[Piece]:
        """What is stored from a position on."""
        path = self._path(attempt)
        position = offset
        while True:
            found = await asyncio.to_thread(_read_records, path, position)
            if not found:
                return
            for piece in found:
                yield piece
            position = found[-1].next_offset

    async def changed(self, attempt: str) -> asyncio.Event:
        """Is set at the next change."""
        return (await self._log(attempt)).changed

    async def ended(self, attempt: str) -> bool:
        """Whether nothing follows."""
        return (await self._log(attempt)).ended

    async def _log(self, attempt: str) -> _Log:
        if attempt not in self._logs:
            found = await asyncio.to_thread(_recover, self._path(attempt))
            self._logs.setdefault(attempt, found)
        return self._logs[attempt]


def _record(stream: int, data: bytes, dropped: int) -> bytes:
    return _HEADER.pack(stream, len(data), dropped) + data


def _write(path: Path, record: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("ab") as file:
        file.write(record)


def _recover(path: Path) -> _Log:
    """The state of a file, read from it; a record that was cut off by a crash is taken off."""
    log = _Log()
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return log
    with file:
        size = path.stat().st_size
        position = 0
        while position + _HEADER.size <= size:
            stream, length, dropped = _HEADER.unpack(file.read(_HEADER.size))
            if position + _HEADER.size + length > size:
                break
            file.seek(length, 1)
            position += _HEADER.size + length
            log.received += length + dropped
            log.stored += length
            log.ended = log.ended or stream == _END
        file.truncate(position)
    return log


def _read_records(path: Path, offset: int) -> list[Piece]:
    """Whole records from a position on, up to about MAX_PIECE_BYTES."""
    found: list[Piece] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return found
    with file:
        file.seek(offset)
        position = offset
        while position - offset < MAX_PIECE_BYTES:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                break
            stream, length, dropped = _HEADER.unpack(header)
            data = file.read(length)
            if len(data) < length:
                break
            position += _HEADER.size + length
            found.append(Piece(stream, data, dropped, position))
    return found
