"""What `write` has answered is on disk, whatever is killed; one that fails harms no other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from outerproduct_scheduler import schema
from outerproduct_scheduler.database import Database, make_engine, migrate

WRITER = """
import asyncio, sys
import sqlalchemy as sa
from outerproduct_scheduler import schema
from outerproduct_scheduler.database import Database

async def one(database, number):
    await database.write(lambda c: c.execute(sa.insert(schema.settings).values(name=str(number), value="x")))
    print(number, flush=True)

async def main():
    database = Database(sys.argv[1])
    for start in range(0, 1000000, 50):
        await asyncio.gather(*(one(database, start + i) for i in range(50)))

asyncio.run(main())
"""


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'test.sqlite3'}"


async def test_many_writers_share_commits_and_none_is_locked_out(tmp_path: Path) -> None:
    database = Database(url(tmp_path))

    async def write(writer: int) -> None:
        for number in range(30):
            name = f"{writer}-{number}"
            await database.write(lambda c, n=name: c.execute(sa.insert(schema.settings).values(name=n, value="x")))

    await asyncio.gather(*(write(writer) for writer in range(32)))
    count = await database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(schema.settings)).scalar())
    assert count == 32 * 30
    await database.close()


async def test_a_write_that_fails_harms_no_other_of_its_group(tmp_path: Path) -> None:
    database = Database(url(tmp_path))

    def insert(name: str) -> asyncio.Future[object]:
        return database.write(lambda c: c.execute(sa.insert(schema.settings).values(name=name, value="x")))

    results = await asyncio.gather(*(insert(name) for name in ("a", "b", "a", "c")), return_exceptions=True)
    assert isinstance(results[2], sa.exc.IntegrityError)
    names = await database.read(lambda c: set(c.execute(sa.select(schema.settings.c.name)).scalars()))
    assert names == {"a", "b", "c"}
    await database.close()


@pytest.mark.parametrize("after_lines", [1, 60, 333])
def test_what_was_answered_before_kill_9_is_there(tmp_path: Path, after_lines: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, url(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answered = [process.stdout.readline().strip() for _ in range(after_lines)]
    process.send_signal(signal.SIGKILL)
    answered += process.stdout.read().split()
    process.wait()
    engine = make_engine(url(tmp_path))
    with engine.connect() as connection:
        stored = set(connection.execute(sa.select(schema.settings.c.name)).scalars())
    assert set(answered) <= stored


def test_the_migrations_make_the_schema_that_the_code_uses(tmp_path: Path) -> None:
    engine = make_engine(url(tmp_path))
    migrate(engine)
    migrate(engine)
    inspector = sa.inspect(engine)
    for table in schema.metadata.sorted_tables:
        made = {column["name"]: column["nullable"] for column in inspector.get_columns(table.name)}
        assert made == {column.name: column.nullable for column in table.columns}
        indexes = {index["name"] for index in inspector.get_indexes(table.name)}
        assert {index.name for index in table.indexes} <= indexes
