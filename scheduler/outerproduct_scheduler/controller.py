"""The life of Runs, Calls and Attempts: what is asked for, placed, dispatched, reported, repeated and cancelled.

One object on one event loop owns all live state. A change is made in memory first, in one step without a pause, and is
written in the same order; everything that others can see (answers, messages to agents, acknowledgements, the wake-up
of those who wait) happens after the commit. When a write fails the process ends, and the next one starts from what is
on disk. Who asks is checked by the services; which node is decided by placement.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
import structlog

from outerproduct.v1 import agent_gateway_pb2 as gateway_pb
from outerproduct.v1 import call_pb2 as pb
from outerproduct.v1 import resources_pb2, run_service_pb2
from outerproduct_scheduler import accelerators, names, retry, schema, states, store, validation
from outerproduct_scheduler.blobs import BlobStore
from outerproduct_scheduler.database import Database
from outerproduct_scheduler.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    TooMuch,
    Unsupported,
    WrongState,
)
from outerproduct_scheduler.names import CallKey
from outerproduct_scheduler.nodes import NodeState, Session
from outerproduct_scheduler.placement import Assignment, ComputeSpec, NodeCapacity, Placement, WaitingCall
from outerproduct_scheduler.store import AttemptRecord, CallRecord

log = structlog.get_logger()

T = TypeVar("T")
P = ParamSpec("P")

RESYNC_SECONDS = 5.0
"""Placement runs at least this often even without an event, so that a lost wake-up costs seconds and not for ever."""
MONITOR_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""Six missed heartbeats of the usual five seconds: the stream is open, and nobody speaks on it."""
CANCEL_GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL: enough to save a checkpoint on a local disk."""
MAX_LIVE_CALLS = 1_000_000
"""Waiting and running Calls in memory, about 4 KiB each without their arguments."""
MAX_DEPTH = 32
"""Of the tree of Calls: each level holds its resources while it waits for the next."""


@dataclass(slots=True)
class LiveCall:
    """A Call that has not ended."""

    record: CallRecord
    attempt: AttemptRecord | None = None
    children: set[CallKey] = field(default_factory=set)
    resubmit: asyncio.TimerHandle | None = None
    resubmit_at: float = 0.0
    last_failure: str = ""
    declines: int = 0
    """Assignments that nodes did not take, one after another."""
    committed: bool = True
    """Whether its newest Attempt is on disk, so that an agent may hear of it."""


def uninterrupted(
    method: Callable[Concatenate[Controller, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Controller, P], Coroutine[Any, Any, T]]:
    """Decorator of a method that changes state: it is finished also when the client that asked goes away."""

    async def wrapper(self: Controller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(method(self, *args, **kwargs))
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return await asyncio.shield(task)

    functools.update_wrapper(wrapper, method)
    return wrapper


class Controller:
    """See the module."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        attempt_token: Callable[[str], str],
        *,
        lost_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._attempt_token = attempt_token
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._placement = Placement()
        self._live: dict[CallKey, LiveCall] = {}
        self._on_node: dict[str, set[CallKey]] = {}
        self._watchers: dict[CallKey, set[asyncio.Future[None]]] = {}
        self._wake = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unfinished: set[asyncio.Task[Any]] = set()
        self.nodes: dict[str, NodeState] = {}

    # Start and background work.

    async def load(self) -> None:
        """Everything that was live when the scheduler last ended is live again; nodes are away until they say hello."""
        now = self._clock()

        def read(connection: sa.Connection) -> tuple[list[Any], list[CallRecord], list[AttemptRecord]]:
            rows = list(connection.execute(sa.select(schema.nodes)))
            return rows, store.live_calls(connection), store.live_attempts(connection)

        rows, calls, attempts = await self._database.read(read)
        for row in rows:
            self.nodes[row.name] = NodeState(
                name=row.name,
                boot_id=row.boot_id,
                agent_version=row.agent_version,
                capacity=resources_pb2.MachineCapacity.FromString(row.capacity),
                agent_labels=dict(row.agent_labels),
                operator_labels=dict(row.operator_labels),
                cordoned=row.cordoned,
                draining=row.draining,
                drain_deadline=row.drain_deadline,
                reason=row.reason,
                last_seen=now,
                heard=time.monotonic(),
            )
            self._node_changed(self.nodes[row.name])
        for record in calls:
            self._live[record.key] = LiveCall(record)
        for record in calls:
            if record.parent is not None and record.parent in self._live:
                self._live[record.parent].children.add(record.key)
        for attempt in attempts:
            live = self._live[attempt.key]
            live.attempt = attempt
            self._occupy(live, attempt)
        for live in list(self._live.values()):
            if live.attempt is None:
                if live.record.cancel_kind:
                    self._end_call(live, _cancelled_outcome(live.record), pb.CALL_STATUS_CANCELLED)
                else:
                    self._submit(live)
        log.info("state_loaded", nodes=len(rows), calls=len(calls), attempts=len(attempts))

    async def run(self) -> None:
        """Placement and the watch over nodes; ends only with an error."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._dispatch_loop(), name="dispatch")
            group.create_task(self._monitor_loop(), name="monitor")
            group.create_task(self._until_a_write_fails(), name="writes")

    async def _until_a_write_fails(self) -> None:
        await self._failed

    def _must(self, write: asyncio.Future[T], then: Callable[[], None] | None = None) -> asyncio.Future[T]:
        """A write that follows from an accepted change. What depends on it happens after the commit, whoever waits;
        when it fails, memory and disk differ, and the process ends to start again from the disk."""

        def done(future: asyncio.Future[T]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                if then is not None:
                    then()
            elif not self._failed.done():
                self._failed.set_exception(error)

        write.add_done_callback(done)
        return write

    async def _dispatch_loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(RESYNC_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass  # The periodic look.
            self._wake.clear()
            await self._dispatch()

    async def _dispatch(self) -> None:
        """Places what can be placed; the assignments are committed together, then sent."""
        now = self._clock()
        started: list[AttemptRecord] = []
        writes: list[asyncio.Future[None]] = []
        for assignment in self._placement.place(now):
            attempt = self._begin_attempt(assignment, now)
            writes.append(self._save_new_attempt(self._live[attempt.key].record, attempt))
            started.append(attempt)
        for write in writes:
            await write
        for attempt in started:
            live = self._live.get(attempt.key)
            if live is not None and live.attempt is attempt:
                live.committed = True
            log.info("attempt_assigned", attempt=attempt.name, node=attempt.node)
            self._send_assign(attempt)

    def _begin_attempt(self, assignment: Assignment, now: float) -> AttemptRecord:
        live = self._live[names.parse_call(assignment.call_id)]
        record = live.record
        record.attempt_count += 1
        record.updated_at = now
        attempt = AttemptRecord(
            key=record.key,
            number=record.attempt_count,
            node=assignment.node,
            accelerator=assignment.accelerator,
            created_at=now,
            updated_at=now,
        )
        live.attempt = attempt
        live.committed = False
        self._on_node.setdefault(attempt.node, set()).add(record.key)
        return attempt

    def _send_assign(self, attempt: AttemptRecord) -> None:
        live = self._live.get(attempt.key)
        node = self.nodes.get(attempt.node)
        if live is None or live.attempt is not attempt or node is None or node.session is None:
            return  # It ended meanwhile, or the node is away: its next hello brings the assignment.
        if attempt.status != pb.ATTEMPT_STATUS_PENDING or not live.committed:
            return
        node.session.send(
            gateway_pb.SchedulerMessage(
                assign=gateway_pb.Assign(
                    attempt=attempt.name,
                    spec=live.record.spec,
                    accelerator=attempt.accelerator,
                    token=self._attempt_token(attempt.name),
                    number=attempt.number,
                    created_by=live.record.created_by,
                )
            )
        )

    async def _monitor_loop(self) -> None:
        while True:
            # A period, not a wait for something: conditions of nodes change with time alone.
            await asyncio.sleep(MONITOR_SECONDS)
            now = self._clock()
            for node in list(self.nodes.values()):
                silent_seconds = time.monotonic() - node.heard
                if node.session is not None and silent_seconds > SILENT_SECONDS:
                    log.warning("node_silent", node=node.name, seconds=round(silent_seconds))
                    node.session.closed.set()
                    self.disconnect(node.session)
                if node.session is None and not node.lost and silent_seconds > self._lost_seconds:
                    self._node_lost(node, silent_seconds)
                if node.draining and node.drain_deadline and now > node.drain_deadline:
                    self._stop_drained(node)
                self._node_changed(node)

    # What users ask for.

    @uninterrupted
    async def create_runs(self, created_by: str, new: Sequence[run_service_pb2.NewRun]) -> list[pb.Run]:
        """Stores Runs and answers them; a known request_id with the same spec answers the Run that there is."""
        for entry in new:
            if not names.is_request_id(entry.request_id):
                raise InvalidArgument(f"request_id={entry.request_id[:80]!r} must be a UUID in lower case")
            self._check(entry.spec)
        self._check_room(len(new))
        self._database.check_room()
        keys = [CallKey(entry.request_id, names.ROOT_CALL) for entry in new]
        known = {record.key: record for record in await self._database.read(lambda c: store.get_calls(c, keys))}
        now = self._clock()
        writes: list[asyncio.Future[None]] = []
        fresh: list[LiveCall] = []
        answers: list[CallRecord] = []
        for key, entry in zip(keys, new, strict=True):
            live = self._live.get(key)
            existing = live.record if live else known.get(key)
            digest = store.run_digest(entry.spec)
            if existing is not None:
                if existing.created_by != created_by or existing.digest != digest:
                    raise Conflict(f"request_id={key.run_id} stands for another Run already: make a new UUID for each")
                answers.append(existing)
                continue
            record = CallRecord(key, created_by, "", 0, 0, entry.spec, digest, now, updated_at=now)
            live = self._live[key] = LiveCall(record)
            fresh.append(live)
            answers.append(record)
            writes.append(self._database.write(functools.partial(store.insert_run, root=record)))
        await self._commit_new(fresh, writes)
        return [store.run_message(record, self.message_of(record)) for record in answers]

    @uninterrupted
    async def create_calls(self, attempt_name: str, new: Sequence[run_service_pb2.NewCall]) -> list[pb.Call]:
        """Child Calls of an Attempt. At an index where its Call has a child already, that one is answered, unless it
        failed in an earlier Attempt: then it starts again."""
        parent_key, number = names.parse_attempt(attempt_name)
        self._live_attempt(parent_key, number)
        if parent_key.depth + 1 > MAX_DEPTH:
            raise TooMuch(f"{parent_key.name} is {MAX_DEPTH} Calls deep: a deeper tree holds resources that never work")
        for entry in new:
            self._check(entry.spec)
            self._check_beside_ancestors(parent_key, entry.spec)
        self._check_room(len(new))
        indices = [entry.child_index for entry in new]

        def read(connection: sa.Connection) -> list[list[CallRecord]]:
            return [store.get_child(connection, parent_key, index) for index in indices]

        stored = await self._database.read(read)
        parent = self._live_attempt(parent_key, number)
        if parent.record.cancel_kind:
            raise PermissionDenied(f"{attempt_name} is being cancelled: it can create no more Calls")
        now = self._clock()
        writes: list[asyncio.Future[None]] = []
        fresh: list[LiveCall] = []
        answers: list[CallRecord] = []
        for entry, earlier in zip(new, stored, strict=True):
            digest = store.spec_digest(entry.spec)
            newest = self._newest_child(parent_key, entry.child_index, earlier)
            if newest is not None:
                if newest.digest != digest:
                    raise Conflict(
                        f"child {entry.child_index} of {parent_key.name} is {newest.spec.function.qualified_name} with "
                        f"other arguments or another function than {entry.spec.function.qualified_name} now: a "
                        "function that is repeated must create the same Calls in the same order"
                    )
                if newest.parent_attempt == number or newest.status in {
                    pb.CALL_STATUS_COMPLETED,
                    pb.CALL_STATUS_RUNNING,
                }:
                    answers.append(newest)
                    continue
            key = parent_key.child(entry.child_index, len(earlier) + 1)
            record = CallRecord(
                key,
                parent.record.created_by,
                parent_key.call_id,
                entry.child_index,
                number,
                entry.spec,
                digest,
                now,
                updated_at=now,
            )
            live = self._live[key] = LiveCall(record)
            parent.children.add(key)
            fresh.append(live)
            answers.append(record)
            writes.append(self._database.write(functools.partial(store.insert_call, call=record)))
        await self._commit_new(fresh, writes)
        return [self.message_of(record) for record in answers]

    def _newest_child(self, parent: CallKey, index: int, stored: list[CallRecord]) -> CallRecord | None:
        for start in range(len(stored) + 1, 0, -1):
            live = self._live.get(parent.child(index, start))
            if live is not None:
                return live.record
        return stored[-1] if stored else None

    async def _commit_new(self, fresh: list[LiveCall], writes: list[asyncio.Future[None]]) -> None:
        results = await asyncio.gather(*writes, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for live, result in zip(fresh, results, strict=True):
            if isinstance(result, BaseException):
                self._live.pop(live.record.key, None)
            elif live.record.status == pb.CALL_STATUS_RUNNING and live.attempt is None:
                self._submit(live)
        if failed:
            raise failed[0]

    def _check(self, spec: pb.CallSpec) -> None:
        validation.check_call_spec(spec)
        for field_name, ref in _blob_refs(spec):
            if not self._blobs.has(ref.sha256, ref.size_bytes):
                raise InvalidArgument(
                    f"{field_name}: blob {ref.sha256} of {ref.size_bytes} bytes is not stored: upload it first"
                )
        unsupported = self._placement.check_supported(_compute(spec), dict(spec.node_labels))
        if unsupported is not None:
            raise Unsupported(unsupported.message)

    def _check_room(self, count: int) -> None:
        if len(self._live) + count > MAX_LIVE_CALLS:
            raise TooMuch(f"{len(self._live)} Calls are waiting or running, and {MAX_LIVE_CALLS} is the limit: wait")

    def _check_beside_ancestors(self, parent_key: CallKey, spec: pb.CallSpec) -> None:
        """A child that no node could hold while its ancestors hold theirs would wait for ever."""
        held: dict[str, list[tuple[pb.CallSpec, str]]] = {}
        key: CallKey | None = parent_key
        while key is not None and (live := self._live.get(key)) is not None:
            if live.attempt is not None:
                held.setdefault(live.attempt.node, []).append((live.record.spec, live.attempt.accelerator))
            key = live.record.parent
        compute = spec.compute
        for node in self.nodes.values():
            if node.lost or any(node.labels.get(name) != value for name, value in spec.node_labels.items()):
                continue
            above = held.get(node.name, [])
            types = accelerators.matching(compute.accelerator, node.capacity.accelerators)
            fits_gpus = not compute.accelerator_count or any(
                node.capacity.accelerators[kind] - sum(s.compute.accelerator_count for s, k in above if k == kind)
                >= compute.accelerator_count
                for kind in types
            )
            if (
                fits_gpus
                and node.capacity.cpus - sum(s.compute.cpus for s, _ in above) >= compute.cpus
                and node.capacity.memory_bytes - sum(s.compute.memory_bytes for s, _ in above) >= compute.memory_bytes
            ):
                return
        raise Unsupported(
            f"{spec.function.qualified_name} asks for {_text(compute)}, and no node has that left beside the Calls "
            f"that wait for it ({parent_key.name} and those above it): it would wait for ever. Ask for less, or let "
            "the parent ask for less."
        )

    def _live_attempt(self, key: CallKey, number: int) -> LiveCall:
        live = self._live.get(key)
        if live is None or live.attempt is None or live.attempt.number != number:
            raise PermissionDenied(f"{key.attempt(number)} has ended: it can create no more Calls")
        return live

    def attempt_runs(self, name: str) -> bool:
        """Whether an Attempt is the live one of its Call."""
        try:
            key, number = names.parse_attempt(name)
        except InvalidArgument:
            return False
        live = self._live.get(key)
        return live is not None and live.attempt is not None and live.attempt.number == number

    # What users look at.

    def message_of(self, record: CallRecord) -> pb.Call:
        """A Call as it is now."""
        live = self._live.get(record.key)
        return record.message(self._pending_reason(live) if live else "")

    def _pending_reason(self, live: LiveCall) -> str:
        now = self._clock()
        if live.attempt is None:
            if live.resubmit is not None:
                wait = max(0.0, live.resubmit_at - now)
                number = live.record.attempt_count
                return f"Attempt {number} failed ({live.last_failure}); the next starts in {wait:.0f} s"
            if live.record.status != pb.CALL_STATUS_RUNNING:
                return ""
            return self._placement.pending_reason(live.record.key.name, now)
        if live.attempt.status == pb.ATTEMPT_STATUS_PENDING:
            return f"on {live.attempt.node}: {live.attempt.detail or 'starting'}"
        return ""

    def live_record(self, key: CallKey) -> CallRecord | None:
        live = self._live.get(key)
        return live.record if live else None

    def live_attempt_record(self, key: CallKey, number: int) -> AttemptRecord | None:
        live = self._live.get(key)
        attempt = live.attempt if live else None
        return attempt if attempt is not None and attempt.number == number else None

    def live_attempts(self, created_by: str | None, node: str) -> list[run_service_pb2.LiveAttempt]:
        """What runs where, in order of node and name; `None` is everybody's, an empty `node` is all of them."""
        found = []
        for name in (node,) if node else sorted(self._on_node):
            for key in sorted(self._on_node.get(name, ()), key=lambda key: key.name):
                live = self._live.get(key)
                if live is None or live.attempt is None or created_by not in {None, live.record.created_by}:
                    continue
                record = live.record
                entry = run_service_pb2.LiveAttempt(
                    attempt=live.attempt.message(),
                    function=record.spec.function.qualified_name,
                    display_name=record.spec.display_name,
                    created_by=record.created_by,
                    compute=record.spec.compute,
                )
                usage = self.nodes[name].usage.get(live.attempt.name) if name in self.nodes else None
                if usage is not None:
                    entry.usage.CopyFrom(usage)
                found.append(entry)
        return found

    def count_waiting_and_running(self, keys: Iterable[CallKey]) -> tuple[int, int]:
        """How many of the Calls have not ended and wait, and how many run."""
        waiting = running = 0
        for key in keys:
            live = self._live.get(key)
            if live is None:
                continue
            if live.attempt is None or live.attempt.started_at is None:
                waiting += 1
            else:
                running += 1
        return waiting, running

    async def call(self, key: CallKey) -> CallRecord:
        """Raises NotFound."""
        record = self.live_record(key) or await self._database.read(lambda c: store.get_call(c, key))
        if record is None:
            raise NotFound(f"{key.name} does not exist")
        return record

    async def wait(self, keys: Sequence[CallKey], timeout_seconds: float) -> list[CallRecord]:
        """Those of the Calls that have ended, as soon as one has; none after the timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while True:
            ended = [key for key in keys if key not in self._live]
            if ended:
                return await self._database.read(functools.partial(store.get_calls, keys=ended))
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self._watch(keys, left):
                return []

    async def _watch(self, keys: Iterable[CallKey], seconds: float) -> bool:
        """Whether one of them ended in time."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watched = list(keys)
        for key in watched:
            self._watchers.setdefault(key, set()).add(woken)
        try:
            async with asyncio.timeout(seconds):
                await woken
        except TimeoutError:
            return False
        finally:
            for key in watched:
                waiting = self._watchers.get(key)
                if waiting is not None:
                    waiting.discard(woken)
                    if not waiting:
                        del self._watchers[key]
        return True

    # Cancellation.

    @uninterrupted
    async def cancel(self, key: CallKey, message: str) -> None:
        """Asks for the end of a Call and its descendants; harmless when it has ended."""
        for write in self._cancel(key, pb.FAILURE_KIND_CANCELLED, message):
            await write

    def _cancel(self, key: CallKey, kind: int, message: str) -> list[asyncio.Future[Any]]:
        live = self._live.get(key)
        if live is None or live.record.status in states.CALL_ENDS:
            return []
        writes = []
        if not live.record.cancel_kind:
            record = live.record
            record.cancel_kind, record.cancel_message = kind, message
            record.status = states.next_call_status(record.status, pb.CALL_STATUS_CANCELLING)
            record.updated_at = self._clock()
            if live.attempt is None:
                writes.append(self._end_call(live, _cancelled_outcome(record), pb.CALL_STATUS_CANCELLED))
            else:
                attempt = live.attempt
                if attempt.status != pb.ATTEMPT_STATUS_CANCELLING:
                    attempt.status = states.next_attempt_status(attempt.status, pb.ATTEMPT_STATUS_CANCELLING)
                    attempt.updated_at = self._clock()
                writes.append(self._save(record, attempt, lambda: self._send_cancel(attempt)))
        for child in list(live.children):
            writes += self._cancel(child, kind, message)
        return writes

    def _send_cancel(self, attempt: AttemptRecord) -> None:
        live = self._live.get(attempt.key)
        node = self.nodes.get(attempt.node)
        if live is None or live.attempt is not attempt or node is None or node.session is None:
            return  # It ended meanwhile, or the node is away: its next hello is answered with the cancellation.
        record = live.record
        self._tell_to_stop(node.session, attempt.name, record.cancel_kind, record.cancel_message)

    def _tell_to_stop(self, session: Session, attempt: str, kind: int, message: str) -> None:
        session.send(
            gateway_pb.SchedulerMessage(
                cancel=gateway_pb.CancelAttempt(
                    attempt=attempt,
                    grace_seconds=CANCEL_GRACE_SECONDS,
                    reason=pb.FailureKind.ValueType(kind),
                    message=message,
                )
            )
        )

    # What agents say.

    @uninterrupted
    async def connect(self, session: Session, hello: gateway_pb.Hello) -> None:
        """A node is (again) there. What it holds and what it should hold are brought together.

        Raises Conflict when another machine is there under the same name.
        """
        now = self._clock()
        node = self.nodes.setdefault(hello.node, NodeState(hello.node))
        if node.session is not None and node.boot_id != hello.boot_id:
            raise Conflict(f"another machine is connected as node {hello.node!r}: give this one its own node_name")
        if node.session is not None:
            node.session.closed.set()
        node.session = session
        node.boot_id = hello.boot_id
        node.agent_version = hello.version
        node.capacity = hello.capacity
        node.gpus = list(hello.gpus)
        node.agent_labels = dict(hello.labels)
        node.not_ready_reason = hello.not_ready_reason
        node.last_seen = now
        node.heard = time.monotonic()
        node.lost = False
        node.told_to_stop.clear()
        await self._save_node(node)
        self._reconcile(node, session, {held.name for held in hello.held}, now)
        session.accepted.set()
        self._node_changed(node)
        self._wake.set()
        log.info("node_connected", node=node.name, held=len(hello.held), version=hello.version)

    def _reconcile(self, node: NodeState, session: Session, held: set[str], now: float) -> None:
        for key in list(self._on_node.get(node.name, ())):
            live = self._live.get(key)
            attempt = live.attempt if live else None
            if live is None or attempt is None:
                continue
            if attempt.name in held:
                held.discard(attempt.name)
                if live.record.cancel_kind:
                    self._send_cancel(attempt)
            elif attempt.started_at is None and not live.record.cancel_kind:
                self._send_assign(attempt)
            else:
                failure = pb.Failure(
                    kind=pb.FAILURE_KIND_NODE_LOST,
                    message=f"{node.name} no longer has {attempt.name}: the machine or its agent's data was reset",
                    node=node.name,
                )
                self._end_attempt(live, pb.Outcome(failure=failure), never_started=attempt.started_at is None)
        for name in sorted(held):
            self._tell_to_stop(session, name, pb.FAILURE_KIND_CANCELLED, "it was replaced or has ended")
        node.last_seen = now

    def disconnect(self, session: Session) -> None:
        """The stream has ended; the node is away until it says hello."""
        node = self.nodes.get(session.node)
        if node is not None and node.session is session:
            node.session = None
            node.last_seen = self._clock()
            node.heard = time.monotonic()
            self._node_changed(node)
            log.warning("node_disconnected", node=node.name)

    def heartbeat(self, session: Session, heartbeat: gateway_pb.Heartbeat) -> None:
        node = self.nodes.get(session.node)
        if node is None or node.session is not session:
            return
        node.last_seen = self._clock()
        node.heard = time.monotonic()
        if heartbeat.HasField("capacity"):
            node.capacity = heartbeat.capacity
            node.gpus = list(heartbeat.gpus)
        node.not_ready_reason = heartbeat.not_ready_reason
        node.usage = {usage.name: usage for usage in heartbeat.usage}
        self._node_changed(node)

    def update(self, session: Session, update: gateway_pb.AttemptUpdate) -> asyncio.Future[Any] | None:
        """Takes a change of an Attempt; it may be acknowledged when the future (if any) is done."""
        try:
            key, number = names.parse_attempt(update.attempt)
        except InvalidArgument:
            log.warning("update_malformed", node=session.node, attempt=update.attempt[:200])
            return None
        live = self._live.get(key)
        attempt = live.attempt if live else None
        if live is None or attempt is None or attempt.number != number or attempt.node != session.node:
            if update.status not in states.ATTEMPT_ENDS:
                self._tell_to_stop(session, update.attempt, pb.FAILURE_KIND_CANCELLED, "it was replaced or has ended")
            return None
        now = self._clock()
        attempt.updated_at = now
        if update.HasField("allocation"):
            attempt.allocation = update.allocation
        attempt.container_id = update.container_id or attempt.container_id
        attempt.detail = update.detail
        if update.status in states.ATTEMPT_ENDS:
            if update.outcome.failure.kind not in retry.BLAME:
                # A kind that only a newer agent knows.
                update.outcome.failure.kind = pb.FAILURE_KIND_UNSPECIFIED
            return self._end_attempt(live, update.outcome, never_started=update.never_started)
        if update.status == pb.ATTEMPT_STATUS_RUNNING and attempt.started_at is None:
            self._started(live, attempt, now)
        return self._save(live.record, attempt)

    def _started(self, live: LiveCall, attempt: AttemptRecord, now: float) -> None:
        attempt.started_at = now
        attempt.detail = ""
        if attempt.status == pb.ATTEMPT_STATUS_PENDING:
            attempt.status = states.next_attempt_status(attempt.status, pb.ATTEMPT_STATUS_RUNNING)
        record = live.record
        record.started_attempts += 1
        record.started_at = record.started_at or now
        record.updated_at = now
        self.nodes[attempt.node].start_worked()

    # Ends.

    def _end_attempt(self, live: LiveCall, outcome: pb.Outcome, *, never_started: bool) -> asyncio.Future[Any]:
        """An Attempt has ended: its resources come back, its children are cancelled, its Call ends or goes on."""
        attempt, record = live.attempt, live.record
        if attempt is None:
            raise states.IllegalTransition(f"{record.key.name} has no Attempt that could end")
        now = self._clock()
        succeeded = outcome.WhichOneof("kind") == "result"
        if not never_started and attempt.started_at is None:
            self._started(live, attempt, now)
        cancelled = bool(record.cancel_kind) and not succeeded
        end = (
            pb.ATTEMPT_STATUS_COMPLETED
            if succeeded
            else pb.ATTEMPT_STATUS_CANCELLED
            if cancelled
            else pb.ATTEMPT_STATUS_FAILED
        )
        attempt.status = states.next_attempt_status(attempt.status, end)
        attempt.finished_at = attempt.updated_at = now
        attempt.outcome = outcome
        attempt.error_message = outcome.failure.message
        self._placement.release(record.key.name)
        self._on_node.get(attempt.node, set()).discard(record.key)
        live.attempt = None
        self._wake.set()
        for child in list(live.children):
            self._cancel(child, pb.FAILURE_KIND_PARENT_ENDED, f"{attempt.name}, which created it, has ended")
        live.children.clear()
        log.info(
            "attempt_ended",
            attempt=attempt.name,
            node=attempt.node,
            status=pb.AttemptStatus.Name(pb.AttemptStatus.ValueType(attempt.status)),
            failure=None if succeeded else pb.FailureKind.Name(outcome.failure.kind),
        )
        if succeeded:
            return self._end_call(live, outcome, pb.CALL_STATUS_COMPLETED, attempt)
        if cancelled:
            return self._end_call(live, _cancelled_outcome(record, outcome), pb.CALL_STATUS_CANCELLED, attempt)
        return self._after_failure(live, attempt, outcome, never_started=never_started)

    def _after_failure(
        self, live: LiveCall, attempt: AttemptRecord, outcome: pb.Outcome, *, never_started: bool
    ) -> asyncio.Future[Any]:
        record, failure = live.record, outcome.failure
        if never_started and retry.BLAME[failure.kind] is retry.Blame.INFRASTRUCTURE:
            node = self.nodes[attempt.node]
            if failure.kind != pb.FAILURE_KIND_DECLINED:
                node.start_failed(self._clock(), failure.message)
                self._node_changed(node)
        again = retry.after_failure(
            failure.kind,
            never_started=never_started,
            started_attempts=record.started_attempts,
            failures_before_start=max(record.failures_before_start, live.declines),
            max_attempts=record.spec.retry_strategy.max_attempts,
        )
        if again is None:
            return self._end_call(live, outcome, pb.CALL_STATUS_FAILED, attempt)
        if again.counts:
            record.failures_before_start += 1
        live.declines = live.declines + 1 if failure.kind == pb.FAILURE_KIND_DECLINED else 0
        if again.avoid_node:
            record.avoid_nodes |= {attempt.node}
        record.updated_at = self._clock()
        live.last_failure = failure.message.partition("\n")[0][:200]
        if again.pause_seconds:
            live.resubmit_at = self._clock() + again.pause_seconds
            live.resubmit = asyncio.get_running_loop().call_later(again.pause_seconds, self._resubmit, live)
        else:
            self._submit(live)
        return self._save(record, attempt)

    def _resubmit(self, live: LiveCall) -> None:
        live.resubmit = None
        if live.record.status == pb.CALL_STATUS_RUNNING and live.attempt is None:
            self._submit(live)

    def _end_call(
        self, live: LiveCall, outcome: pb.Outcome, status: int, attempt: AttemptRecord | None = None
    ) -> asyncio.Future[Any]:
        record = live.record
        now = self._clock()
        if live.resubmit is not None:
            live.resubmit.cancel()
            live.resubmit = None
        self._placement.withdraw(record.key.name)
        record.status = states.next_call_status(record.status, status)
        record.outcome = outcome
        record.error_message = outcome.failure.message
        record.finished_at = record.updated_at = now
        return self._save(record, attempt, lambda: self._forget(record))

    def _forget(self, record: CallRecord) -> None:
        """The end is committed: the Call leaves the memory, and those who wait for it are woken."""
        self._live.pop(record.key, None)
        parent = self._live.get(record.parent) if record.parent else None
        if parent is not None:
            parent.children.discard(record.key)
        for woken in self._watchers.get(record.key, ()):
            if not woken.done():
                woken.set_result(None)

    # Nodes.

    def _node_changed(self, node: NodeState) -> None:
        """Tells placement what the node is now."""
        if node.lost:
            return
        self._placement.set_node(node.name, node.offered(), node.condition(self._clock()), node.labels)
        self._wake.set()

    def _node_lost(self, node: NodeState, away_seconds: float) -> None:
        node.lost = True
        log.warning("node_lost", node=node.name, seconds=round(away_seconds))
        for key in list(self._on_node.get(node.name, ())):
            live = self._live.get(key)
            if live is None or live.attempt is None:
                continue
            failure = pb.Failure(
                kind=pb.FAILURE_KIND_NODE_LOST,
                message=(
                    f"{node.name} was lost: its agent has not been connected for {away_seconds:.0f} s. Its work may "
                    "still have had effects there."
                ),
                node=node.name,
            )
            self._end_attempt(live, pb.Outcome(failure=failure), never_started=live.attempt.started_at is None)
        self._placement.remove_node(node.name)
        self._wake.set()

    def _stop_drained(self, node: NodeState) -> None:
        for key in self._on_node.get(node.name, ()):
            live = self._live.get(key)
            if live and live.attempt and node.session and live.attempt.name not in node.told_to_stop:
                node.told_to_stop.add(live.attempt.name)
                self._tell_to_stop(
                    node.session, live.attempt.name, pb.FAILURE_KIND_NODE_LOST, f"{node.name} was drained"
                )

    @uninterrupted
    async def change_node(self, /, name: str, **changes: Any) -> NodeState:
        """Sets fields of a node (cordoned, draining, ...), stores and applies them. Raises NotFound."""
        node = self.node(name)
        for field_name, value in changes.items():
            setattr(node, field_name, value)
        await self._save_node(node)
        self._node_changed(node)
        return node

    @uninterrupted
    async def forget_node(self, name: str) -> None:
        """Takes a node that is lost, or away without Attempts, off the list. Raises NotFound, WrongState."""
        node = self.node(name)
        if node.session is not None:
            raise WrongState(f"node {name!r} is connected: stop its agent first, or cordon it")
        held = len(self._on_node.get(name, ()))
        if held:
            raise WrongState(
                f"node {name!r} is away and may still run {held} Attempts: wait until it is lost, or cancel them"
            )
        del self.nodes[name]
        self._placement.remove_node(name)
        table = schema.nodes
        await self._must(self._database.write(lambda c: c.execute(sa.delete(table).where(table.c.name == name))))
        log.info("node_forgotten", node=name)

    def node(self, name: str) -> NodeState:
        """Raises NotFound."""
        node = self.nodes.get(name)
        if node is None:
            raise NotFound(f"node {name!r} has never registered: see ListNodes")
        return node

    def node_use(self, name: str) -> tuple[NodeCapacity, int]:
        """What is given out on a machine, and how many Attempts it has."""
        used_cpus = used_memory = 0
        used_types: dict[str, int] = {}
        keys = self._on_node.get(name, set())
        for key in keys:
            live = self._live.get(key)
            if live is None or live.attempt is None:
                continue
            compute = live.record.spec.compute
            used_cpus += compute.cpus
            used_memory += compute.memory_bytes
            if compute.accelerator_count:
                kind = live.attempt.accelerator
                used_types[kind] = used_types.get(kind, 0) + compute.accelerator_count
        return NodeCapacity(used_cpus, used_memory, used_types), len(keys)

    # Small parts.

    def _submit(self, live: LiveCall) -> None:
        record = live.record
        self._placement.submit(
            WaitingCall(
                call_id=record.key.name,
                spec=_compute(record.spec),
                owner=record.created_by,
                priority=record.spec.priority,
                submitted_at=record.created_at,
                timeout_seconds=record.spec.timeout_seconds or None,
                labels=dict(record.spec.node_labels),
                avoid_nodes=record.avoid_nodes,
            )
        )
        self._wake.set()

    def _occupy(self, live: LiveCall, attempt: AttemptRecord) -> None:
        self._on_node.setdefault(attempt.node, set()).add(attempt.key)
        self._placement.occupy(
            attempt.key.name,
            attempt.node,
            _compute(live.record.spec),
            attempt.accelerator,
            attempt.started_at or attempt.created_at,
            live.record.spec.timeout_seconds or None,
            live.record.created_by,
        )

    def _save_new_attempt(self, record: CallRecord, attempt: AttemptRecord) -> asyncio.Future[None]:
        call_values, attempt_values = store.changing_call(record), store.changing_attempt(attempt)

        def write(connection: sa.Connection) -> None:
            store.insert_attempt(connection, attempt, attempt_values)
            store.save_call(connection, record, call_values)

        return self._must(self._database.write(write))

    def _save(
        self, record: CallRecord, attempt: AttemptRecord | None, then: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Writes both; `then` runs after the commit."""
        call_values = store.changing_call(record)
        attempt_values = store.changing_attempt(attempt) if attempt is not None else None

        def write(connection: sa.Connection) -> None:
            if attempt is not None and attempt_values is not None:
                store.save_attempt(connection, attempt, attempt_values)
            store.save_call(connection, record, call_values)

        return self._must(self._database.write(write), then)

    async def _save_node(self, node: NodeState) -> None:
        values = {
            "boot_id": node.boot_id,
            "agent_version": node.agent_version,
            "capacity": node.capacity.SerializeToString(),
            "agent_labels": node.agent_labels,
            "operator_labels": node.operator_labels,
            "cordoned": node.cordoned,
            "draining": node.draining,
            "drain_deadline": node.drain_deadline,
            "reason": node.reason,
        }

        def write(connection: sa.Connection) -> None:
            table = schema.nodes
            if connection.execute(sa.update(table).where(table.c.name == node.name).values(values)).rowcount == 0:
                connection.execute(sa.insert(table).values(name=node.name, **values))

        await self._must(self._database.write(write))


def _compute(spec: pb.CallSpec) -> ComputeSpec:
    compute = spec.compute
    return ComputeSpec(compute.cpus, compute.memory_bytes, compute.accelerator, compute.accelerator_count)


def _text(compute: resources_pb2.ComputeSpec) -> str:
    gpus = f", {compute.accelerator_count} x {compute.accelerator or 'GPU'}" if compute.accelerator_count else ""
    return f"{compute.cpus} CPUs, {compute.memory_bytes / 1024**3:.4g} GiB{gpus}"


def _cancelled_outcome(record: CallRecord, ended: pb.Outcome | None = None) -> pb.Outcome:
    """The outcome of a Call that was cancelled: why, and what its Attempt said at the end."""
    failure = pb.Failure(kind=pb.FailureKind.ValueType(record.cancel_kind), message=record.cancel_message)
    if ended is not None:
        failure.node = ended.failure.node
        failure.exit_code = ended.failure.exit_code
        failure.signal = ended.failure.signal
        failure.traceback = ended.failure.traceback
    return pb.Outcome(failure=failure)


def _blob_refs(spec: pb.CallSpec) -> Iterable[tuple[str, Any]]:
    if spec.function.HasField("source"):
        yield "source", spec.function.source
    if spec.function.pickled.WhichOneof("content") == "blob":
        yield "pickled", spec.function.pickled.blob
    if spec.arguments.WhichOneof("content") == "blob":
        yield "arguments", spec.arguments.blob
    for mount in spec.image.mounts:
        yield f"image: {mount.remote_path}", mount.content
