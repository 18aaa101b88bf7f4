"""Blobs on this machine's disk: fetched once however many Attempts want them, the least recently used thrown away."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from outerproduct.v1 import payload_pb2
from outerproduct_agent.scheduler_link import SchedulerLink

MAX_CACHED_BYTES = 20 * 1024**3
"""Sources are small and shared by many Calls; large arguments are used once and soon make room."""


class BlobCache:
    """Files named by their digest."""

    def __init__(self, folder: Path, link: SchedulerLink) -> None:
        self._folder = folder
        self._link = link
        self._locks: dict[str, asyncio.Lock] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in folder.glob("*.part"):
            leftover.unlink()

    async def get(self, ref: payload_pb2.BlobRef) -> Path:
        """The file with a blob's content. Raises Refused when the scheduler does not have it."""
        path = self._folder / ref.sha256
        lock = self._locks.setdefault(ref.sha256, asyncio.Lock())
        try:
            async with lock:
                if not path.exists():
                    await asyncio.to_thread(self._make_room, ref.size_bytes)
                    await self._link.download(ref, path)
                await asyncio.to_thread(os.utime, path)
        finally:
            if not lock.locked():
                self._locks.pop(ref.sha256, None)
        return path

    def _make_room(self, size_bytes: int) -> None:
        entries = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir())
        total = sum(size for _, size, _ in entries) + size_bytes
        for _, size, path in entries:
            if total <= MAX_CACHED_BYTES:
                return
            # Whoever has it open goes on reading; whoever unpacks it next fetches it again.
            path.unlink(missing_ok=True)
            total -= size
