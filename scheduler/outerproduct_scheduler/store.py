"""What is in the tables, as records; and the statements. No policy: the controller decides, this writes it down."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from outerproduct.v1 import call_pb2 as pb
from outerproduct.v1 import resources_pb2
from outerproduct_scheduler import names, schema, states
from outerproduct_scheduler.names import CallKey


@dataclass(slots=True)
class AttemptRecord:
    """One row of `attempts`."""

    key: CallKey
    number: int
    node: str
    accelerator: str
    created_at: float
    status: int = pb.ATTEMPT_STATUS_PENDING
    error_message: str = ""
    started_at: float | None = None
    updated_at: float = 0.0
    finished_at: float | None = None
    allocation: resources_pb2.Allocation | None = None
    container_id: str = ""
    detail: str = ""
    outcome: pb.Outcome | None = None

    @property
    def name(self) -> str:
        return self.key.attempt(self.number)

    def message(self) -> pb.Attempt:
        message = pb.Attempt(
            name=self.name,
            call=self.key.name,
            number=self.number,
            status=pb.AttemptStatus.ValueType(self.status),
            error_message=self.error_message,
            node=self.node,
            allocation=self.allocation,
            container_id=self.container_id,
            outcome=self.outcome,
            detail="" if self.status in states.ATTEMPT_ENDS else self.detail,
        )
        _set_times(message, self)
        return message


@dataclass(slots=True)
class CallRecord:
    """One row of `calls`, with the creator of its Run."""

    key: CallKey
    created_by: str
    parent_id: str
    child_index: int
    parent_attempt: int
    spec: pb.CallSpec
    digest: str
    created_at: float
    status: int = pb.CALL_STATUS_RUNNING
    attempt_count: int = 0
    started_attempts: int = 0
    failures_before_start: int = 0
    error_message: str = ""
    started_at: float | None = None
    updated_at: float = 0.0
    finished_at: float | None = None
    outcome: pb.Outcome | None = None
    cancel_kind: int = pb.FAILURE_KIND_UNSPECIFIED
    cancel_message: str = ""
    # Not stored.
    avoid_nodes: frozenset[str] = field(default_factory=frozenset)

    @property
    def parent(self) -> CallKey | None:
        return CallKey(self.key.run_id, self.parent_id) if self.parent_id else None

    def message(self, pending_reason: str = "") -> pb.Call:
        parent = self.parent
        message = pb.Call(
            name=self.key.name,
            run=self.key.run_name,
            created_by=self.created_by,
            parent_call=parent.name if parent else "",
            child_index=self.child_index,
            function=self.spec.function.qualified_name,
            status=pb.CallStatus.ValueType(self.status),
            attempt_count=self.attempt_count,
            latest_attempt=self.key.attempt(self.attempt_count) if self.attempt_count else "",
            error_message=self.error_message,
            pending_reason=pending_reason,
            outcome=self.outcome,
            compute=self.spec.compute,
            image=self.spec.image.base,
            display_name=self.spec.display_name,
            argument_previews=self.spec.argument_previews,
            labels=self.spec.labels,
            retry_strategy=self.spec.retry_strategy,
            timeout_seconds=self.spec.timeout_seconds,
        )
        _set_times(message, self)
        return message


def run_message(root: CallRecord, root_message: pb.Call) -> pb.Run:
    """A Run from its root Call, whose state it has."""
    message = pb.Run(
        name=root.key.run_name,
        display_name=root.spec.display_name,
        created_by=root.created_by,
        status=pb.RunStatus.ValueType(states.RUN_OF_CALL[root.status]),
        error_message=root.error_message,
        root_call=root_message,
    )
    message.created_at.FromNanoseconds(int(root.created_at * 1e9))
    message.updated_at.FromNanoseconds(int((root.updated_at or root.created_at) * 1e9))
    return message


def _set_times(message: Any, record: AttemptRecord | CallRecord) -> None:
    for name in ("created_at", "started_at", "updated_at", "finished_at"):
        value = getattr(record, name)
        if value:
            getattr(message, name).FromNanoseconds(int(value * 1e9))


def spec_digest(spec: pb.CallSpec) -> str:
    """Of what makes a repeated child Call the same: its function and its arguments."""
    function = pb.Function()
    function.CopyFrom(spec.function)
    function.ClearField("source_text")
    parts = (function, spec.arguments)
    return hashlib.sha256(b"".join(part.SerializeToString(deterministic=True) for part in parts)).hexdigest()


def run_digest(spec: pb.CallSpec) -> str:
    """Of a whole spec: whether a repeated request is the same."""
    return hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest()


def insert_run(connection: sa.Connection, root: CallRecord) -> None:
    connection.execute(
        sa.insert(schema.runs).values(
            id=root.key.run_id,
            display_name=root.spec.display_name,
            created_by=root.created_by,
            status=states.RUN_OF_CALL[root.status],
            error_message=root.error_message,
            created_at=root.created_at,
            updated_at=root.created_at,
        )
    )
    insert_call(connection, root)


def insert_call(connection: sa.Connection, call: CallRecord) -> None:
    connection.execute(
        sa.insert(schema.calls).values(
            run_id=call.key.run_id,
            id=call.key.call_id,
            parent_id=call.parent_id,
            child_index=call.child_index,
            parent_attempt=call.parent_attempt,
            spec=call.spec.SerializeToString(),
            digest=call.digest,
            created_at=call.created_at,
            **changing_call(call),
        )
    )


def save_call(connection: sa.Connection, call: CallRecord, values: dict[str, Any]) -> None:
    """`values` are those of `changing_call`, taken when the change was made: the record may have moved on."""
    table = schema.calls
    connection.execute(
        sa.update(table).where(table.c.run_id == call.key.run_id, table.c.id == call.key.call_id).values(values)
    )
    if call.key.call_id == names.ROOT_CALL:
        connection.execute(
            sa.update(schema.runs)
            .where(schema.runs.c.id == call.key.run_id)
            .values(
                status=states.RUN_OF_CALL[values["status"]],
                error_message=values["error_message"],
                updated_at=values["updated_at"],
            )
        )


def changing_call(call: CallRecord) -> dict[str, Any]:
    return {
        "status": call.status,
        "attempt_count": call.attempt_count,
        "started_attempts": call.started_attempts,
        "failures_before_start": call.failures_before_start,
        "error_message": call.error_message,
        "started_at": call.started_at,
        "updated_at": call.updated_at or call.created_at,
        "finished_at": call.finished_at,
        "outcome": call.outcome.SerializeToString() if call.outcome else None,
        "cancel_kind": call.cancel_kind,
        "cancel_message": call.cancel_message,
    }


def changing_attempt(attempt: AttemptRecord) -> dict[str, Any]:
    return {
        "status": attempt.status,
        "error_message": attempt.error_message,
        "started_at": attempt.started_at,
        "updated_at": attempt.updated_at or attempt.created_at,
        "finished_at": attempt.finished_at,
        "allocation": attempt.allocation.SerializeToString() if attempt.allocation else None,
        "container_id": attempt.container_id,
        "detail": attempt.detail,
        "outcome": attempt.outcome.SerializeToString() if attempt.outcome else None,
    }


def insert_attempt(connection: sa.Connection, attempt: AttemptRecord, values: dict[str, Any]) -> None:
    connection.execute(
        sa.insert(schema.attempts).values(
            run_id=attempt.key.run_id,
            call_id=attempt.key.call_id,
            number=attempt.number,
            node=attempt.node,
            accelerator=attempt.accelerator,
            created_at=attempt.created_at,
            **values,
        )
    )


def save_attempt(connection: sa.Connection, attempt: AttemptRecord, values: dict[str, Any]) -> None:
    table = schema.attempts
    connection.execute(
        sa.update(table)
        .where(
            table.c.run_id == attempt.key.run_id,
            table.c.call_id == attempt.key.call_id,
            table.c.number == attempt.number,
        )
        .values(values)
    )


def _call_of(row: Any) -> CallRecord:
    return CallRecord(
        key=CallKey(row.run_id, row.id),
        created_by=row.created_by,
        parent_id=row.parent_id,
        child_index=row.child_index,
        parent_attempt=row.parent_attempt,
        spec=pb.CallSpec.FromString(row.spec),
        digest=row.digest,
        created_at=row.created_at,
        status=row.status,
        attempt_count=row.attempt_count,
        started_attempts=row.started_attempts,
        failures_before_start=row.failures_before_start,
        error_message=row.error_message,
        started_at=row.started_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
        outcome=None if row.outcome is None else pb.Outcome.FromString(row.outcome),
        cancel_kind=row.cancel_kind,
        cancel_message=row.cancel_message,
    )


def _attempt_of(row: Any) -> AttemptRecord:
    return AttemptRecord(
        key=CallKey(row.run_id, row.call_id),
        number=row.number,
        node=row.node,
        accelerator=row.accelerator,
        created_at=row.created_at,
        status=row.status,
        error_message=row.error_message,
        started_at=row.started_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
        allocation=None if row.allocation is None else resources_pb2.Allocation.FromString(row.allocation),
        container_id=row.container_id,
        detail=row.detail,
        outcome=None if row.outcome is None else pb.Outcome.FromString(row.outcome),
    )


def _select_calls() -> sa.Select[Any]:
    return sa.select(schema.calls, schema.runs.c.created_by).join(
        schema.runs, schema.runs.c.id == schema.calls.c.run_id
    )


def get_call(connection: sa.Connection, key: CallKey) -> CallRecord | None:
    calls = schema.calls
    row = connection.execute(_select_calls().where(calls.c.run_id == key.run_id, calls.c.id == key.call_id)).first()
    return _call_of(row) if row else None


def get_calls(connection: sa.Connection, keys: Sequence[CallKey]) -> list[CallRecord]:
    calls = schema.calls
    found = []
    for start in range(0, len(keys), 200):  # Databases bound the parameters of one statement.
        part = keys[start : start + 200]
        condition = sa.or_(*(sa.and_(calls.c.run_id == key.run_id, calls.c.id == key.call_id) for key in part))
        found += [_call_of(row) for row in connection.execute(_select_calls().where(condition))]
    return found


def get_child(connection: sa.Connection, parent: CallKey, child_index: int) -> list[CallRecord]:
    """What was created at an index, oldest first: more than one where it had to start again."""
    calls = schema.calls
    rows = connection.execute(
        _select_calls()
        .where(calls.c.run_id == parent.run_id, calls.c.parent_id == parent.call_id, calls.c.child_index == child_index)
        .order_by(calls.c.created_at, calls.c.id)
    )
    return [_call_of(row) for row in rows]


def list_calls(
    connection: sa.Connection, run_id: str, parent_id: str, after: tuple[float, str] | None, limit: int
) -> list[CallRecord]:
    calls = schema.calls
    query = _select_calls().where(calls.c.run_id == run_id)
    if parent_id:
        query = query.where(calls.c.parent_id == parent_id)
    if after:
        query = query.where(sa.tuple_(calls.c.created_at, calls.c.id) > sa.tuple_(*map(sa.literal, after)))
    rows = connection.execute(query.order_by(calls.c.created_at, calls.c.id).limit(limit))
    return [_call_of(row) for row in rows]


def list_roots(
    connection: sa.Connection, created_by: str | None, before: tuple[float, str] | None, limit: int
) -> list[CallRecord]:
    """Root Calls of Runs, newest first."""
    runs = schema.runs
    query = _select_calls().where(schema.calls.c.id == names.ROOT_CALL)
    if created_by is not None:
        query = query.where(runs.c.created_by == created_by)
    if before:
        query = query.where(sa.tuple_(runs.c.created_at, runs.c.id) < sa.tuple_(*map(sa.literal, before)))
    rows = connection.execute(query.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit))
    return [_call_of(row) for row in rows]


def live_calls(connection: sa.Connection) -> list[CallRecord]:
    calls = schema.calls
    rows = connection.execute(
        _select_calls().where(calls.c.status.not_in(states.CALL_ENDS)).order_by(calls.c.created_at, calls.c.id)
    )
    return [_call_of(row) for row in rows]


def live_attempts(connection: sa.Connection) -> list[AttemptRecord]:
    attempts = schema.attempts
    rows = connection.execute(sa.select(attempts).where(attempts.c.status.not_in(states.ATTEMPT_ENDS)))
    return [_attempt_of(row) for row in rows]


def get_attempt(connection: sa.Connection, key: CallKey, number: int) -> AttemptRecord | None:
    attempts = schema.attempts
    row = connection.execute(
        sa.select(attempts).where(
            attempts.c.run_id == key.run_id, attempts.c.call_id == key.call_id, attempts.c.number == number
        )
    ).first()
    return _attempt_of(row) if row else None


def list_attempts(connection: sa.Connection, key: CallKey, after: int, limit: int) -> list[AttemptRecord]:
    attempts = schema.attempts
    rows = connection.execute(
        sa.select(attempts)
        .where(attempts.c.run_id == key.run_id, attempts.c.call_id == key.call_id, attempts.c.number > after)
        .order_by(attempts.c.number)
        .limit(limit)
    )
    return [_attempt_of(row) for row in rows]


def run_creator(connection: sa.Connection, run_id: str) -> str | None:
    found = connection.execute(sa.select(schema.runs.c.created_by).where(schema.runs.c.id == run_id)).scalar()
    return None if found is None else str(found)
