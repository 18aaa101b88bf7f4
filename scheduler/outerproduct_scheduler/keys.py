"""API keys: made, listed and revoked on the scheduler's machine, by whoever may read its data folder."""

from __future__ import annotations

import time
from dataclasses import dataclass

import sqlalchemy as sa

from outerproduct_scheduler import auth, schema
from outerproduct_scheduler.errors import Conflict, InvalidArgument, NotFound


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without the key."""

    name: str
    role: str
    created_at: float
    revoked_at: float | None


KEY_ROLES = (auth.Role.USER.value, auth.Role.OPERATOR.value, auth.Role.AGENT.value)


def create(engine: sa.Engine, name: str, role: str) -> str:
    """The new key, shown this once. Raises InvalidArgument or Conflict."""
    if role not in KEY_ROLES:
        raise InvalidArgument(f"role={role!r} must be one of {', '.join(KEY_ROLES)}")
    if not name or len(name) > 128 or not name.isprintable():
        raise InvalidArgument(f"name={name!r} must be 1 to 128 printable characters")
    key = auth.new_key()
    values = {"digest": auth.digest_of(key), "name": name, "role": role, "created_at": time.time()}
    try:
        with engine.begin() as connection:
            connection.execute(sa.insert(schema.api_keys).values(values))
    except sa.exc.IntegrityError:
        raise Conflict(f"there is a key with the name {name!r} already: choose another name, or revoke it") from None
    return key


def list_keys(engine: sa.Engine) -> list[ApiKey]:
    """All keys, oldest first."""
    table = schema.api_keys
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table).order_by(table.c.created_at))
        return [ApiKey(row.name, row.role, row.created_at, row.revoked_at) for row in rows]


def revoke(engine: sa.Engine, name: str) -> None:
    """From now on the key is refused; its name is free again. Raises NotFound."""
    table = schema.api_keys
    now = time.time()
    with engine.begin() as connection:
        result = connection.execute(
            sa.update(table)
            .where(table.c.name == name, table.c.revoked_at.is_(None))
            .values(revoked_at=now, name=f"{name} (revoked {now:.3f})")
        )
    if result.rowcount == 0:
        raise NotFound(f"there is no key with the name {name!r}: see `keys list`")
