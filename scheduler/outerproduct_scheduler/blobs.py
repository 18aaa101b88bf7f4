"""Content-addressed files: written to a temporary name, checked, synced and renamed, so that what has its name is
whole. Bytes come and go in chunks; no blob is ever in memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from outerproduct_scheduler.errors import InvalidArgument, NotFound, TooMuch

CHUNK_BYTES = 1024**2
MAX_BLOB_BYTES = 64 * 1024**3
"""A guard against mistakes: nothing that belongs into one argument or result is larger."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Blobs below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Uploads that a killed process has left behind.
        for leftover in folder.glob("upload-*"):
            leftover.unlink()

    def path(self, sha256: str) -> Path:
        """Raises InvalidArgument for what is not a digest: it becomes part of a path."""
        if not _SHA256.fullmatch(sha256):
            raise InvalidArgument(f"sha256={sha256[:80]!r} must be 64 lower-case hex digits")
        return self._folder / sha256[:2] / sha256

    def has(self, sha256: str, size_bytes: int) -> bool:
        try:
            return self.path(sha256).stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    async def store(self, sha256: str, size_bytes: int, chunks: AsyncIterator[bytes]) -> None:
        """Raises InvalidArgument when the content is not what was announced; nothing is stored then."""
        target = self.path(sha256)
        if size_bytes > MAX_BLOB_BYTES:
            raise TooMuch(f"size_bytes={size_bytes} is more than the {MAX_BLOB_BYTES} bytes that one blob may have")
        descriptor, temporary = tempfile.mkstemp(prefix="upload-", dir=self._folder)
        digest = hashlib.sha256()
        written = 0
        try:
            with os.fdopen(descriptor, "wb") as file:
                async for chunk in chunks:
                    written += len(chunk)
                    if len(chunk) > CHUNK_BYTES or written > size_bytes:
                        raise InvalidArgument(  # noqa: TRY301 - the clean-up below is for every way out
                            f"blob {sha256}: more than {size_bytes} bytes, or a chunk above 1 MiB"
                        )
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                if written != size_bytes or digest.hexdigest() != sha256:
                    raise InvalidArgument(  # noqa: TRY301
                        f"blob {sha256}: {written} bytes with digest {digest.hexdigest()} came, {size_bytes} announced"
                    )
                await asyncio.to_thread(_sync, file)
            await asyncio.to_thread(_publish, Path(temporary), target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    async def read(self, sha256: str, offset: int) -> AsyncIterator[bytes]:
        """Chunks from an offset on. Raises NotFound."""
        try:
            file = await asyncio.to_thread(self.path(sha256).open, "rb")
        except FileNotFoundError:
            raise NotFound(f"blob {sha256} is not stored: upload it first") from None
        with file:
            await asyncio.to_thread(file.seek, offset)
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(temporary: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, mode=0o700)
    temporary.replace(target)
    for folder in (target.parent, target.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
