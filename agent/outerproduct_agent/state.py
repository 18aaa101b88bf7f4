"""What the agent must not forget: its Attempts with how far each has come, and updates that are not acknowledged.

SQLite from the standard library, synced at every commit, on one thread. An update is here before it is sent and until
the scheduler has it; the same transaction that adds the last update of an Attempt takes the Attempt away.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from outerproduct.v1 import agent_gateway_pb2 as pb
from outerproduct_agent.ledger import Allocation

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    name TEXT PRIMARY KEY,
    assign BLOB NOT NULL,
    allocation TEXT NOT NULL,
    phase INTEGER NOT NULL,
    container_id TEXT NOT NULL DEFAULT '',
    outcome BLOB,
    stop_kind INTEGER NOT NULL DEFAULT 0,
    stop_message TEXT NOT NULL DEFAULT '',
    started_at REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS updates (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    attempt TEXT NOT NULL,
    message BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS pythons (image_id TEXT PRIMARY KEY, found TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS images (reference TEXT PRIMARY KEY, image_id TEXT NOT NULL, used_at REAL NOT NULL);
"""


class Phase(IntEnum):
    """How far an Attempt has come. Each is on disk before what it stands for is done."""

    ACCEPTED = 1
    """Its resources are taken; it may have a container that has not been started."""
    CALLING = 2
    """The function may have begun."""
    HAS_OUTCOME = 3
    """The runner has brought its outcome, which is stored."""


@dataclass(slots=True)
class StoredAttempt:
    """One Attempt as it is on disk."""

    assign: pb.Assign
    allocation: Allocation
    phase: Phase = Phase.ACCEPTED
    container_id: str = ""
    outcome: bytes | None = None
    """The serialized Outcome that the runner brought; a large payload lies in a file beside it."""
    stop_kind: int = 0
    stop_message: str = ""
    started_at: float = 0.0

    @property
    def name(self) -> str:
        return self.assign.attempt


class AgentState:
    """The agent's database."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, "state")
        self._path = path
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        def connect() -> None:
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_SCHEMA)

        await self._in_thread(connect)

    async def close(self) -> None:
        await self._in_thread(self._db.close)
        self._thread.shutdown()

    async def load(self) -> list[StoredAttempt]:
        """All Attempts, oldest first."""

        def read() -> list[StoredAttempt]:
            rows = self._db.execute(
                "SELECT assign, allocation, phase, container_id, outcome, stop_kind, stop_message, started_at "
                "FROM attempts ORDER BY rowid"
            )
            return [
                StoredAttempt(
                    assign=pb.Assign.FromString(row[0]),
                    allocation=Allocation.from_json(json.loads(row[1])),
                    phase=Phase(row[2]),
                    container_id=row[3],
                    outcome=row[4],
                    stop_kind=row[5],
                    stop_message=row[6],
                    started_at=row[7],
                )
                for row in rows
            ]

        return await self._in_thread(read)

    async def save(self, attempt: StoredAttempt, update: pb.AttemptUpdate | None = None) -> None:
        """Writes an Attempt, and with it an update for the scheduler."""
        values = (
            attempt.name,
            attempt.assign.SerializeToString(),
            json.dumps(attempt.allocation.to_json()),
            int(attempt.phase),
            attempt.container_id,
            attempt.outcome,
            attempt.stop_kind,
            attempt.stop_message,
            attempt.started_at,
        )

        def write() -> None:
            self._db.execute(
                "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "phase = excluded.phase, container_id = excluded.container_id, outcome = excluded.outcome, "
                "stop_kind = excluded.stop_kind, stop_message = excluded.stop_message, "
                "started_at = excluded.started_at",
                values,
            )
            self._add_update(update)

        await self._in_transaction(write)

    async def finish(self, name: str, update: pb.AttemptUpdate) -> None:
        """Takes an Attempt away and adds its last update."""

        def write() -> None:
            self._db.execute("DELETE FROM attempts WHERE name = ?", (name,))
            self._add_update(update)

        await self._in_transaction(write)

    async def add_update(self, update: pb.AttemptUpdate) -> None:
        """An update of an Attempt that is not stored (declined, unknown)."""
        await self._in_transaction(lambda: self._add_update(update))

    def _add_update(self, update: pb.AttemptUpdate | None) -> None:
        if update is not None:
            self._db.execute(
                "INSERT INTO updates (attempt, message) VALUES (?, ?)", (update.attempt, update.SerializeToString())
            )

    async def updates(self, after: int, limit: int = 500) -> list[pb.AttemptUpdate]:
        """Updates that are not acknowledged, in order, with their sequence numbers."""

        def read() -> list[pb.AttemptUpdate]:
            found = []
            for sequence, message in self._db.execute(
                "SELECT sequence, message FROM updates WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, limit)
            ):
                update = pb.AttemptUpdate.FromString(message)
                update.sequence = sequence
                found.append(update)
            return found

        return await self._in_thread(read)

    async def acknowledged(self, sequence: int) -> None:
        await self._in_transaction(lambda: self._db.execute("DELETE FROM updates WHERE sequence <= ?", (sequence,)))

    async def unacknowledged_attempts(self) -> set[str]:
        def read() -> set[str]:
            return {row[0] for row in self._db.execute("SELECT DISTINCT attempt FROM updates")}

        return await self._in_thread(read)

    async def python_of(self, image_id: str) -> dict[str, Any] | None:
        """What an earlier probe of an image has found."""

        def read() -> dict[str, Any] | None:
            row = self._db.execute("SELECT found FROM pythons WHERE image_id = ?", (image_id,)).fetchone()
            return json.loads(row[0]) if row else None

        return await self._in_thread(read)

    async def save_python(self, image_id: str, found: dict[str, Any]) -> None:
        await self._in_transaction(
            lambda: self._db.execute("INSERT OR REPLACE INTO pythons VALUES (?, ?)", (image_id, json.dumps(found)))
        )

    async def image_used(self, reference: str, image_id: str, at: float) -> None:
        await self._in_transaction(
            lambda: self._db.execute("INSERT OR REPLACE INTO images VALUES (?, ?, ?)", (reference, image_id, at))
        )

    async def used_images(self) -> list[tuple[str, str, float]]:
        """Reference, id and time of last use; newest use first."""
        return await self._in_thread(
            lambda: self._db.execute("SELECT reference, image_id, used_at FROM images ORDER BY used_at DESC").fetchall()
        )

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RuntimeError("the state is not open")
        return self._connection

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _in_transaction(self, function: Callable[[], object]) -> None:
        def run() -> None:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                function()
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

        # What has begun is finished, also when its caller is cancelled: half a step is what a restart can not mend.
        await asyncio.shield(self._in_thread(run))
