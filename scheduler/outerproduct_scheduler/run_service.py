"""RunService: checks who asks, and hands on to controller and store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from outerproduct.v1 import call_pb2, run_service_pb2, run_service_pb2_grpc
from outerproduct_scheduler import names, store
from outerproduct_scheduler.access import check_access, may_see
from outerproduct_scheduler.adapters import MAX_PAGE, from_token, page_size, streaming, to_token, unary
from outerproduct_scheduler.auth import Identity, Role, current_identity
from outerproduct_scheduler.controller import Controller
from outerproduct_scheduler.database import Database
from outerproduct_scheduler.errors import InvalidArgument, NotFound
from outerproduct_scheduler.logs import LogStore
from outerproduct_scheduler.names import CallKey
from outerproduct_scheduler.store import CallRecord

MAX_BATCH = 1000
MAX_WAIT_SECONDS = 60.0
SHOWN_WAITING = 10
MAX_ANSWER_BYTES = 2 * 1024**2

M = TypeVar("M", bound=Message)
LOG_LOOK_SECONDS = 5.0
"""A follower looks this often whether its Attempt has ended without a last piece of output (a lost node)."""


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """See proto/outerproduct/v1/run_service.proto."""

    def __init__(self, controller: Controller, database: Database, logs: LogStore) -> None:
        self._controller = controller
        self._database = database
        self._logs = logs

    @unary
    async def GetMe(  # noqa: N802
        self, request: run_service_pb2.GetMeRequest, context: Any
    ) -> run_service_pb2.GetMeResponse:
        identity = current_identity()
        return run_service_pb2.GetMeResponse(name=identity.name, role=identity.role.value)

    @unary
    async def CreateRuns(  # noqa: N802
        self, request: run_service_pb2.CreateRunsRequest, context: Any
    ) -> run_service_pb2.CreateRunsResponse:
        _check_batch("runs", len(request.runs))
        runs = await self._controller.create_runs(current_identity().name, request.runs)
        return run_service_pb2.CreateRunsResponse(runs=runs)

    @unary
    async def CreateCalls(  # noqa: N802
        self, request: run_service_pb2.CreateCallsRequest, context: Any
    ) -> run_service_pb2.CreateCallsResponse:
        _check_batch("calls", len(request.calls))
        calls = await self._controller.create_calls(current_identity().name, request.calls)
        return run_service_pb2.CreateCallsResponse(calls=calls)

    @unary
    async def GetRun(self, request: run_service_pb2.GetRunRequest, context: Any) -> call_pb2.Run:  # noqa: N802
        return await self._run(request.name)

    @unary
    async def ListRuns(  # noqa: N802
        self, request: run_service_pb2.ListRunsRequest, context: Any
    ) -> run_service_pb2.ListRunsResponse:
        identity = current_identity()
        creator = None if identity.role is Role.OPERATOR else identity.name
        limit = page_size(request.page_size)
        before = from_token(request.page_token, (float, str))
        roots = await self._database.read(lambda c: store.list_roots(c, creator, before, limit))
        roots = [self._controller.live_record(root.key) or root for root in roots]
        runs = _as_many_as_fit([store.run_message(root, self._controller.message_of(root)) for root in roots])
        last = roots[len(runs) - 1] if runs else None
        more = len(runs) < len(roots) or len(roots) == limit
        return run_service_pb2.ListRunsResponse(
            runs=runs, next_page_token=to_token(last.created_at, last.key.run_id) if last and more else ""
        )

    @unary
    async def CancelRun(  # noqa: N802
        self, request: run_service_pb2.CancelRunRequest, context: Any
    ) -> call_pb2.Run:
        root = await self._seen(CallKey(names.parse_run(request.name), names.ROOT_CALL))
        await self._controller.cancel(root.key, _cancelled_by(current_identity()))
        return await self._run(request.name)

    @unary
    async def GetCall(self, request: run_service_pb2.GetCallRequest, context: Any) -> call_pb2.Call:  # noqa: N802
        return self._controller.message_of(await self._seen(names.parse_call(request.name)))

    @unary
    async def ListCalls(  # noqa: N802
        self, request: run_service_pb2.ListCallsRequest, context: Any
    ) -> run_service_pb2.ListCallsResponse:
        run_id = names.parse_run(request.run)
        await self._seen(CallKey(run_id, names.ROOT_CALL))
        parent_id = ""
        if request.parent_call:
            parent = names.parse_call(request.parent_call)
            if parent.run_id != run_id:
                raise InvalidArgument(f"parent_call={request.parent_call} is not a Call of run={request.run}")
            parent_id = parent.call_id
        limit = page_size(request.page_size)
        after = from_token(request.page_token, (float, str))
        found = await self._database.read(lambda c: store.list_calls(c, run_id, parent_id, after, limit))
        found = [self._controller.live_record(record.key) or record for record in found]
        calls = _as_many_as_fit([self._controller.message_of(record) for record in found])
        last = found[len(calls) - 1] if calls else None
        more = len(calls) < len(found) or len(found) == limit
        return run_service_pb2.ListCallsResponse(
            calls=calls, next_page_token=to_token(last.created_at, last.key.call_id) if last and more else ""
        )

    @unary
    async def CancelCall(  # noqa: N802
        self, request: run_service_pb2.CancelCallRequest, context: Any
    ) -> call_pb2.Call:
        key = names.parse_call(request.name)
        await self._seen(key)
        await self._controller.cancel(key, _cancelled_by(current_identity()))
        return self._controller.message_of(await self._seen(key))

    @unary
    async def WaitCalls(  # noqa: N802
        self, request: run_service_pb2.WaitCallsRequest, context: Any
    ) -> run_service_pb2.WaitCallsResponse:
        _check_batch("names", len(request.names))
        if not 0 <= request.timeout_seconds <= MAX_WAIT_SECONDS:
            raise InvalidArgument(f"timeout_seconds={request.timeout_seconds} must be from 0 to {MAX_WAIT_SECONDS}")
        keys = [names.parse_call(name) for name in request.names]
        await self._check_all(keys)
        ended = await self._controller.wait(keys, request.timeout_seconds)
        response = run_service_pb2.WaitCallsResponse(calls=_as_many_as_fit([record.message() for record in ended]))
        for key in keys:
            live = self._controller.live_record(key)
            if live is not None and len(response.waiting) < SHOWN_WAITING:
                response.waiting.append(self._controller.message_of(live))
        response.waiting_count, response.running_count = self._controller.count_waiting_and_running(keys)
        return response

    @unary
    async def GetAttempt(  # noqa: N802
        self, request: run_service_pb2.GetAttemptRequest, context: Any
    ) -> call_pb2.Attempt:
        key, number = names.parse_attempt(request.name)
        await self._seen(key)
        found = self._controller.live_attempt_record(key, number) or await self._database.read(
            lambda c: store.get_attempt(c, key, number)
        )
        if found is None:
            raise NotFound(f"{request.name} does not exist")
        return found.message()

    @unary
    async def ListAttempts(  # noqa: N802
        self, request: run_service_pb2.ListAttemptsRequest, context: Any
    ) -> run_service_pb2.ListAttemptsResponse:
        key = names.parse_call(request.call)
        await self._seen(key)
        limit = page_size(request.page_size)
        position = from_token(request.page_token, (int,))
        after = position[0] if position else 0
        found = await self._database.read(lambda c: store.list_attempts(c, key, after, limit))
        attempts = _as_many_as_fit(
            [(self._controller.live_attempt_record(key, attempt.number) or attempt).message() for attempt in found]
        )
        more = len(attempts) < len(found) or len(found) == limit
        return run_service_pb2.ListAttemptsResponse(
            attempts=attempts, next_page_token=to_token(attempts[-1].number) if attempts and more else ""
        )

    @streaming
    async def ReadLogs(  # noqa: N802
        self, request: run_service_pb2.ReadLogsRequest, context: Any
    ) -> AsyncIterator[run_service_pb2.ReadLogsResponse]:
        key, _ = names.parse_attempt(request.attempt)
        await self._seen(key)
        offset = request.offset
        while True:
            changed = await self._logs.changed(request.attempt)
            over = await self._logs.ended(request.attempt) or not self._controller.attempt_runs(request.attempt)
            async for piece in self._logs.read(request.attempt, offset):
                offset = piece.next_offset
                if piece.data or piece.dropped_bytes:
                    yield run_service_pb2.ReadLogsResponse(
                        stream=run_service_pb2.LogStream.ValueType(piece.stream),
                        data=piece.data,
                        next_offset=piece.next_offset,
                        dropped_bytes=piece.dropped_bytes,
                    )
            if over or not request.follow:
                if not self._controller.attempt_runs(request.attempt):
                    self._logs.forget(request.attempt)
                return
            try:
                async with asyncio.timeout(LOG_LOOK_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    @unary
    async def ListLiveAttempts(  # noqa: N802
        self, request: run_service_pb2.ListLiveAttemptsRequest, context: Any
    ) -> run_service_pb2.ListLiveAttemptsResponse:
        identity = current_identity()
        creator = None if identity.role is Role.OPERATOR else identity.name
        limit = min(request.page_size or MAX_PAGE, MAX_PAGE)
        position = from_token(request.page_token, (str, str))
        rest = [
            entry
            for entry in self._controller.live_attempts(creator, request.node)
            if position is None or (entry.attempt.node, entry.attempt.name) > position
        ]
        attempts = _as_many_as_fit(rest[:limit])
        more = len(attempts) < len(rest)
        last = attempts[-1].attempt if attempts and more else None
        return run_service_pb2.ListLiveAttemptsResponse(
            attempts=attempts, next_page_token=to_token(last.node, last.name) if last else ""
        )

    async def _run(self, name: str) -> call_pb2.Run:
        root = await self._seen(CallKey(names.parse_run(name), names.ROOT_CALL))
        return store.run_message(root, self._controller.message_of(root))

    async def _seen(self, key: CallKey) -> CallRecord:
        """The Call, if the caller may see it. Raises NotFound."""
        record = await self._controller.call(key)
        check_access(current_identity(), record)
        return record

    async def _check_all(self, keys: list[CallKey]) -> None:
        """Raises NotFound unless all exist and may be seen."""
        identity = current_identity()
        stored = []
        for key in keys:
            live = self._controller.live_record(key)
            if live is None:
                stored.append(key)
            else:
                check_access(identity, live)
        if not stored:
            return
        found = {record.key: record for record in await self._database.read(lambda c: store.get_calls(c, stored))}
        for key in stored:
            record = found.get(key)
            if record is None or not may_see(identity, key.run_id, record.created_by):
                raise NotFound(f"{key.name} does not exist")


def _as_many_as_fit(messages: list[M]) -> list[M]:
    """The first messages of a page, at least one: results travel in them, and gRPC bounds an answer to 4 MiB."""
    size = 0
    for count, message in enumerate(messages):
        size += message.ByteSize()
        if size > MAX_ANSWER_BYTES and count:
            return messages[:count]
    return messages


def _check_batch(field: str, count: int) -> None:
    if not 1 <= count <= MAX_BATCH:
        raise InvalidArgument(f"{field}: 1 to {MAX_BATCH} are taken, {count} came")


def _cancelled_by(identity: Identity) -> str:
    return f"cancelled by {identity.name}"
