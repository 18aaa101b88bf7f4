"""Output of an Attempt on its way to the scheduler: read from Docker as it comes, kept on disk until it is there.

Docker's stream is read from its beginning each time (after a restart of the agent, too), and what is in the file
already is passed over, so nothing is lost or doubled. The file is bounded; what does not fit is counted.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct.v1 import run_service_pb2

MAX_SPOOLED_BYTES = 64 * 1024**2
"""Per Attempt, and what the scheduler keeps of one."""
PIECE_BYTES = 256 * 1024

_HEADER = struct.Struct(">BI")


class LogSpool:
    """The file of one Attempt."""

    def __init__(self, path: Path, attempt: str) -> None:
        self._path = path
        self._attempt = attempt
        self._lock = threading.Lock()
        self.size_bytes = sum(len(data) for _, data, _ in _records(path, 0))
        self.dropped_bytes = 0
        self.complete = False
        """Whether nothing will be added."""

    def fill(self, pieces: Iterator[tuple[int, bytes]], added: Callable[[], None]) -> None:
        """Adds what is not here yet; `added` is called after each piece. Blocks until the output has ended."""
        skip = self.size_bytes
        with self._path.open("ab") as file:
            for stream, whole in pieces:
                data = whole
                if skip:
                    passed = min(skip, len(data))
                    skip -= passed
                    data = data[passed:]
                if not data:
                    continue
                room = MAX_SPOOLED_BYTES - self.size_bytes
                kept = data[:room]
                with self._lock:
                    self.dropped_bytes += len(data) - len(kept)
                    if kept:
                        file.write(_HEADER.pack(stream, len(kept)) + kept)
                        file.flush()
                        self.size_bytes += len(kept)
                added()

    async def chunk_from(self, offset: int) -> pb.LogChunk | None:
        """The next message for the scheduler from a position of the output on; None when there is none now."""
        found = await asyncio.to_thread(self._piece_from, offset)
        if found is not None:
            stream, data = found
            return pb.LogChunk(
                attempt=self._attempt, stream=run_service_pb2.LogStream.ValueType(stream), offset=offset, data=data
            )
        if self.complete:
            return pb.LogChunk(
                attempt=self._attempt,
                stream=run_service_pb2.LOG_STREAM_STDOUT,
                offset=offset,
                dropped_bytes=self.dropped_bytes,
                last=True,
            )
        return None

    def _piece_from(self, offset: int) -> tuple[int, bytes] | None:
        stream_of_piece = 0
        piece = b""
        for stream, data, position in _records(self._path, offset):
            if piece and (stream != stream_of_piece or len(piece) + len(data) > PIECE_BYTES):
                break
            stream_of_piece = stream
            piece += data[max(0, offset - position) :]
        return (stream_of_piece, piece) if piece else None

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _records(path: Path, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """Whole records that reach beyond a position of the output: stream, data, position of the data."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        position = 0
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            stream, length = _HEADER.unpack(header)
            if position + length <= offset:
                file.seek(length, 1)
            else:
                data = file.read(length)
                if len(data) < length:
                    return
                yield stream, data, position
            position += length
