"""A scheduler in memory: real gRPC on a real port, and the same answers for the agent's socket.

Calls end as soon as they are created, unless their test holds them; their functions run in the test's own process.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import inspect
import pickle
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from outerproduct.v1 import (
    blob_service_pb2,
    blob_service_pb2_grpc,
    call_pb2,
    node_service_pb2,
    node_service_pb2_grpc,
    payload_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
)

API_KEY = "op_test_key"
COMPLETED = call_pb2.CALL_STATUS_COMPLETED
FAILED = call_pb2.CALL_STATUS_FAILED
RUNNING = call_pb2.CALL_STATUS_RUNNING


class Refused(Exception):
    """An answer with a gRPC status instead of a message."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


async def _awaited(value: Any) -> Any:
    return await value


def _rpc(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: FakeScheduler, request: Any, context: grpc.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata())
        self.authorizations.append(str(metadata.get("authorization", "")))
        if metadata.get("authorization") != f"Bearer {API_KEY}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown API key")
        try:
            return method(self, request)
        except Refused as refused:
            return context.abort(grpc.StatusCode[refused.code], str(refused))

    return checked


class FakeScheduler(
    run_service_pb2_grpc.RunServiceServicer,
    node_service_pb2_grpc.NodeServiceServicer,
    blob_service_pb2_grpc.BlobServiceServicer,
):
    """`specs` has what was submitted, in order; `held` functions stay unfinished until `release`."""

    def __init__(self) -> None:
        self.specs: list[call_pb2.CallSpec] = []
        self.child_indices: list[int] = []
        self.blobs: dict[str, bytes] = {}
        self.authorizations: list[str] = []
        self.uploads: list[str] = []
        self.refusals: list[Refused] = []
        """Answered to the next CreateRuns, one each."""
        self.lost_answers = 0
        """Answers of CreateRuns that still get lost: it has happened, and the caller does not know."""
        self.log_pieces: list[bytes] = []
        self.broken_log_streams = 0
        """Streams of ReadLogs that still end after one piece."""
        self.largest_page = 2
        """Runs in one answer; small, so that several are needed."""
        self.waits = 0
        self.held: set[str] = set()
        """Qualified names of functions that do not end by themselves."""
        self._calls: dict[str, call_pb2.Call] = {}
        self._runs: dict[str, run_service_pb2.NewRun] = {}
        self._changed = threading.Condition()
        self._server: Any = None
        self.port = 0

    # The process.

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serves, after `stop` on the same port again."""
        self._server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        run_service_pb2_grpc.add_RunServiceServicer_to_server(self, self._server)
        node_service_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        blob_service_pb2_grpc.add_BlobServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Ends at once, requests under way included."""
        self._server.stop(None).wait()

    # What tests do to it.

    def release(self) -> None:
        """Lets all held Calls end."""
        with self._changed:
            self.held.clear()
            for name, spec in self._specs_by_name.items():
                if self._calls[name].status == RUNNING:
                    self._end(self._calls[name], spec)
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Blocks until the condition holds after some request."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30)

    # RunService.

    def get_me(self, _: run_service_pb2.GetMeRequest) -> run_service_pb2.GetMeResponse:
        return run_service_pb2.GetMeResponse(name="alice", role="user")

    def create_runs(self, request: run_service_pb2.CreateRunsRequest) -> run_service_pb2.CreateRunsResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        answer = run_service_pb2.CreateRunsResponse()
        for new in request.runs:
            name = f"runs/{new.request_id}"
            if new.request_id not in self._runs:
                self._runs[new.request_id] = new
                self._create(f"{name}/calls/root", new.spec)
            answer.runs.append(self._run(name))
        if self.lost_answers:
            self.lost_answers -= 1
            raise Refused("UNAVAILABLE", "the connection was lost")
        return answer

    def create_calls(self, request: run_service_pb2.CreateCallsRequest) -> run_service_pb2.CreateCallsResponse:
        answer = run_service_pb2.CreateCallsResponse()
        for new in request.calls:
            self.child_indices.append(new.child_index)
            name = f"runs/r/calls/{uuid.uuid4()}"
            self._create(name, new.spec)
            self._calls[name].child_index = new.child_index
            answer.calls.append(self._calls[name])
        return answer

    def get_run(self, request: run_service_pb2.GetRunRequest) -> call_pb2.Run:
        if request.name.removeprefix("runs/") not in self._runs:
            raise Refused("NOT_FOUND", f"there is no {request.name}")
        return self._run(request.name)

    def list_runs(self, request: run_service_pb2.ListRunsRequest) -> run_service_pb2.ListRunsResponse:
        names = [f"runs/{run_id}" for run_id in reversed(self._runs)]
        start = int(request.page_token or 0)
        end = start + min(request.page_size or 100, self.largest_page)
        return run_service_pb2.ListRunsResponse(
            runs=[self._run(name) for name in names[start:end]],
            next_page_token=str(end) if end < len(names) else "",
        )

    def get_call(self, request: run_service_pb2.GetCallRequest) -> call_pb2.Call:
        if request.name not in self._calls:
            raise Refused("NOT_FOUND", f"there is no {request.name}")
        return self._calls[request.name]

    def cancel_run(self, request: run_service_pb2.CancelRunRequest) -> call_pb2.Run:
        call = self._calls[f"{request.name}/calls/root"]
        call.status = call_pb2.CALL_STATUS_CANCELLED
        call.outcome.failure.kind = call_pb2.FAILURE_KIND_CANCELLED
        call.outcome.failure.message = "cancelled by alice"
        return self._run(request.name)

    def list_calls(self, request: run_service_pb2.ListCallsRequest) -> run_service_pb2.ListCallsResponse:
        calls = [call for call in self._calls.values() if call.run == request.run]
        return run_service_pb2.ListCallsResponse(calls=[c for c in calls if c.parent_call == request.parent_call])

    def list_attempts(self, request: run_service_pb2.ListAttemptsRequest) -> run_service_pb2.ListAttemptsResponse:
        call = self._calls[request.call]
        attempt = call_pb2.Attempt(name=f"{call.name}/attempts/1", call=call.name, number=1, node="gpu-1")
        attempt.status = call_pb2.ATTEMPT_STATUS_RUNNING
        if call.status != RUNNING:
            attempt.status = call_pb2.ATTEMPT_STATUS_COMPLETED
            attempt.outcome.CopyFrom(call.outcome)
        attempt.allocation.cpu_ids = "0-3"
        return run_service_pb2.ListAttemptsResponse(attempts=[attempt])

    def wait_calls(self, request: run_service_pb2.WaitCallsRequest) -> run_service_pb2.WaitCallsResponse:
        def ended() -> list[call_pb2.Call]:
            return [self._calls[name] for name in request.names if self._calls[name].status != RUNNING]

        with self._changed:
            self.waits += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(ended()), timeout=request.timeout_seconds)
            waiting = [call for name in request.names if (call := self._calls[name]).status == RUNNING]
            return run_service_pb2.WaitCallsResponse(calls=ended(), waiting=waiting[:10])

    def list_nodes(self, _: node_service_pb2.ListNodesRequest) -> node_service_pb2.ListNodesResponse:
        node = node_service_pb2.Node(name="gpu-1")
        node.total_resources.cpus = 32
        node.total_resources.memory_bytes = 2**37
        node.total_resources.accelerator = "L4"
        node.total_resources.accelerator_count = 4
        node.status.allocated_resources.cpus = 2
        node.status.condition = node_service_pb2.NODE_CONDITION_READY
        return node_service_pb2.ListNodesResponse(nodes=[node])

    # BlobService.

    def find_missing_blobs(
        self, request: blob_service_pb2.FindMissingBlobsRequest
    ) -> blob_service_pb2.FindMissingBlobsResponse:
        missing = [ref for ref in request.blobs if ref.sha256 not in self.blobs]
        return blob_service_pb2.FindMissingBlobsResponse(missing=missing)

    def store(self, data: bytes) -> payload_pb2.BlobRef:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        self.uploads.append(digest)
        return payload_pb2.BlobRef(sha256=digest, size_bytes=len(data))

    # What it is made of.

    @property
    def _specs_by_name(self) -> dict[str, call_pb2.CallSpec]:
        return dict(zip(self._calls, self.specs, strict=True))

    def _create(self, name: str, spec: call_pb2.CallSpec) -> None:
        call = call_pb2.Call(name=name, run=name.partition("/calls/")[0], function=spec.function.qualified_name)
        call.created_at.GetCurrentTime()
        call.status = RUNNING
        call.pending_reason = "waiting for a CPU"
        with self._changed:
            self.specs.append(spec)
            self._calls[name] = call
            if spec.function.qualified_name not in self.held:
                self._end(call, spec)
            self._changed.notify_all()

    def _end(self, call: call_pb2.Call, spec: call_pb2.CallSpec) -> None:
        call.outcome.CopyFrom(self._outcome(spec))
        call.status = COMPLETED if call.outcome.WhichOneof("kind") == "result" else FAILED
        call.pending_reason = ""

    def _outcome(self, spec: call_pb2.CallSpec) -> call_pb2.Outcome:
        function = spec.function
        if function.by_value:
            target = pickle.loads(self.bytes_of(function.pickled))
        else:
            module, _, path = function.qualified_name.partition(":")
            target = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        args, kwargs = pickle.loads(self.bytes_of(spec.arguments))
        outcome = call_pb2.Outcome()
        try:
            value = target(*args, **kwargs)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        except Exception as error:
            outcome.failure.kind = call_pb2.FAILURE_KIND_EXCEPTION
            outcome.failure.message = str(error)
            outcome.failure.exception_type = f"builtins.{type(error).__name__}"
            outcome.failure.traceback = traceback.format_exc()
            outcome.failure.exception.inline = pickle.dumps(error)
            return outcome
        outcome.result.CopyFrom(self.payload(pickle.dumps(value)))
        return outcome

    def payload(self, data: bytes) -> payload_pb2.Payload:
        if len(data) <= 256 * 1024:
            return payload_pb2.Payload(inline=data)
        return payload_pb2.Payload(blob=self.store(data))

    def bytes_of(self, payload: payload_pb2.Payload) -> bytes:
        if payload.WhichOneof("content") == "blob":
            return self.blobs[payload.blob.sha256]
        return payload.inline

    def _run(self, name: str) -> call_pb2.Run:
        root = self._calls[f"{name}/calls/root"]
        spec = self._runs[name.removeprefix("runs/")].spec
        run = call_pb2.Run(name=name, display_name=spec.display_name, root_call=root)
        run.status = {RUNNING: call_pb2.RUN_STATUS_RUNNING, COMPLETED: call_pb2.RUN_STATUS_COMPLETED}.get(
            root.status, call_pb2.RUN_STATUS_FAILED
        )
        return run

    # gRPC.

    GetMe = _rpc(get_me)
    CreateRuns = _rpc(create_runs)
    CreateCalls = _rpc(create_calls)
    GetRun = _rpc(get_run)
    ListRuns = _rpc(list_runs)
    GetCall = _rpc(get_call)
    CancelRun = _rpc(cancel_run)
    ListCalls = _rpc(list_calls)
    ListAttempts = _rpc(list_attempts)
    WaitCalls = _rpc(wait_calls)
    ListNodes = _rpc(list_nodes)
    FindMissingBlobs = _rpc(find_missing_blobs)

    def ReadLogs(self, request: Any, context: Any) -> Iterator[run_service_pb2.ReadLogsResponse]:  # noqa: N802
        for offset, piece in enumerate(self.log_pieces[request.offset :], start=request.offset + 1):
            yield run_service_pb2.ReadLogsResponse(
                stream=run_service_pb2.LOG_STREAM_STDOUT, data=piece, next_offset=offset
            )
            if self.broken_log_streams:
                self.broken_log_streams -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")

    def UploadBlob(self, request_iterator: Iterator[Any], context: Any) -> payload_pb2.BlobRef:  # noqa: N802
        ref = next(request_iterator).ref
        stored = self.store(b"".join(message.chunk for message in request_iterator))
        assert stored == ref
        return stored

    def DownloadBlob(self, request: Any, context: Any) -> Iterator[blob_service_pb2.DownloadBlobResponse]:  # noqa: N802
        data = self.blobs[request.sha256][request.offset :]
        for start in range(0, len(data), 2**20):
            yield blob_service_pb2.DownloadBlobResponse(chunk=data[start : start + 2**20])
