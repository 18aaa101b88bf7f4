"""The connection to the database: one writer that commits for many at once, readers beside it, the migrations.

What callers are told is on disk: `write` returns after the commit. Writes that wait at the same moment share one
commit, each in a savepoint of its own, so a failing one harms no other. SQLite (WAL) by default; any database of
SQLAlchemy by URL.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from outerproduct_scheduler.errors import TooMuch

T = TypeVar("T")

MAX_WAITING_WRITES = 20_000
"""Beyond it new work is refused (`check_room`). Writes that follow from what was accepted are never refused, and are
bounded by it: the queue itself must not block the event loop."""
MAX_GROUP = 500
"""Writes in one commit."""
BUSY_SECONDS = 30
"""How long SQLite waits for another process (the command line that makes a key, a backup)."""
READERS = 4

Operation = Callable[[sa.Connection], Any]


def make_engine(url: str) -> sa.Engine:
    """An engine with what SQLite needs to be durable and to let readers read while one writes."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: Any) -> None:
            # sqlite3's own handling of transactions would commit before a savepoint:
            # https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
            connection.isolation_level = None
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")
            cursor.execute("PRAGMA journal_mode=WAL")
            # WAL with NORMAL may lose the last commits at power loss; what was acknowledged must be there.
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.close()

        @sa.event.listens_for(engine, "begin")
        def _begin(connection: sa.Connection) -> None:
            deferred = connection.get_execution_options().get("read_only")
            connection.exec_driver_sql("BEGIN" if deferred else "BEGIN IMMEDIATE")

    return engine


def migrate(engine: sa.Engine) -> None:
    """Brings the schema to this version's."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


class Database:
    """Used from one event loop; the blocking work is done in threads of its own."""

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url)
        migrate(self._engine)
        self._writes: queue.SimpleQueue[tuple[Operation, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, "database-reader")
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception when the writer dies; whoever owns the process waits for it."""
        self._thread = threading.Thread(target=self._write_all, name="database-writer", daemon=True)
        self._thread.start()

    def write(self, operation: Callable[[sa.Connection], T]) -> asyncio.Future[T]:
        """Queues the operation at once, in order; the future has its value after the commit, or its exception.

        The operation may be run again when a commit fails as a whole, so it must have no other effects.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._writes.put((operation, future))
        return future

    def check_room(self) -> None:
        """Raises TooMuch when the database does not keep up: new work must wait."""
        if self._writes.qsize() > MAX_WAITING_WRITES:
            raise TooMuch(f"{self._writes.qsize()} writes wait for the database: try again in a moment")

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """Runs the operation on a snapshot."""

        def run() -> T:
            with self._engine.connect().execution_options(read_only=True) as connection:
                return operation(connection)

        return await self._loop.run_in_executor(self._readers, run)

    async def close(self) -> None:
        """Commits what is queued and ends the threads."""
        self._writes.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        self._readers.shutdown()
        self._engine.dispose()

    def _write_all(self) -> None:
        try:
            with self._engine.connect() as connection:
                while (group := self._next_group()) is not None:
                    self._commit(connection, group)
        except Exception as error:  # noqa: BLE001 - its owner waits for `failed` and ends the process with it
            self._loop.call_soon_threadsafe(_fail, self.failed, error)

    def _next_group(self) -> list[tuple[Operation, asyncio.Future[Any]]] | None:
        first = self._writes.get()
        if first is None:
            return None
        group = [first]
        while len(group) < MAX_GROUP:
            try:
                entry = self._writes.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                self._writes.put(None)
                break
            group.append(entry)
        return group

    def _commit(self, connection: sa.Connection, group: list[tuple[Operation, asyncio.Future[Any]]]) -> None:
        done: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        with connection.begin():
            for operation, future in group:
                try:
                    with connection.begin_nested():
                        value = operation(connection)
                except Exception as error:  # noqa: BLE001 - handed to the caller
                    done.append((future, None, error))
                else:
                    done.append((future, value, None))
        self._loop.call_soon_threadsafe(_settle, done)


def _settle(done: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for future, value, error in done:
        if future.done():
            continue  # The caller has gone; the commit stands.
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
