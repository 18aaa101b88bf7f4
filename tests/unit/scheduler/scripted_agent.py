"""A scheduler on a free port and agents that follow a script: they speak the gateway's protocol and run nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from tests.support.stack import free_port

from outerproduct.v1 import agent_gateway_pb2 as gateway_pb
from outerproduct.v1 import (
    agent_gateway_pb2_grpc,
    call_pb2,
    node_service_pb2_grpc,
    resources_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
)
from outerproduct_scheduler import keys
from outerproduct_scheduler.config import SchedulerConfig
from outerproduct_scheduler.database import make_engine, migrate
from outerproduct_scheduler.server import serve

GIB = 1024**3
WAIT_SECONDS = 20.0


class Scheduler:
    """The real server in this process, with a key for each role."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.port = free_port()
        self.config = SchedulerConfig(
            listen=f"127.0.0.1:{self.port}", data_dir=folder, heartbeat_seconds=1.0, **settings
        )
        folder.mkdir(parents=True, exist_ok=True)
        engine = make_engine(self.config.url)
        migrate(engine)
        names = {key.name for key in keys.list_keys(engine)}
        self.keys = {
            name: keys.create(engine, f"{name}-{uuid.uuid4()}" if name in names else name, role)
            for name, role in (("alice", "user"), ("bob", "user"), ("root", "operator"), ("agent", "agent"))
        }
        engine.dispose()
        self._task: asyncio.Task[None] | None = None
        self.channel: grpc.aio.Channel
        self.runs: Any
        self.nodes: Any

    async def start(self) -> None:
        self._task = asyncio.create_task(serve(self.config))
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        async with asyncio.timeout(WAIT_SECONDS):
            ready = asyncio.create_task(self.channel.channel_ready())
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)
        self.nodes = node_service_pb2_grpc.NodeServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def as_(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys.get(name, name)}"),)

    async def submit(
        self, spec: call_pb2.CallSpec | None = None, *, who: str = "alice", run_id: str = ""
    ) -> call_pb2.Run:
        new = run_service_pb2.NewRun(request_id=run_id or str(uuid.uuid4()), spec=spec or call_spec())
        answer = await self.runs.CreateRuns(
            run_service_pb2.CreateRunsRequest(runs=[new]), metadata=self.as_(who), timeout=WAIT_SECONDS
        )
        run: call_pb2.Run = answer.runs[0]
        return run

    async def wait(self, call: str, *, who: str = "alice") -> call_pb2.Call:
        answer = await self.runs.WaitCalls(
            run_service_pb2.WaitCallsRequest(names=[call], timeout_seconds=WAIT_SECONDS),
            metadata=self.as_(who),
            timeout=WAIT_SECONDS + 5,
        )
        assert answer.calls, f"{call} did not end: {answer.waiting}"
        ended: call_pb2.Call = answer.calls[0]
        return ended

    async def get_call(self, call: str, *, who: str = "alice") -> call_pb2.Call:
        found: call_pb2.Call = await self.runs.GetCall(
            run_service_pb2.GetCallRequest(name=call), metadata=self.as_(who), timeout=WAIT_SECONDS
        )
        return found


class ScriptedAgent:
    """One stream. Messages are taken from `next`; what is sent is up to the test."""

    def __init__(self, scheduler: Scheduler, node: str = "box", **capacity: Any) -> None:
        self.node = node
        self.boot_id = "boot-1"
        self.capacity = resources_pb2.MachineCapacity(
            cpus=capacity.get("cpus", 4),
            memory_bytes=capacity.get("memory_bytes", 16 * GIB),
            accelerators=capacity.get("accelerators", {}),
        )
        self._scheduler = scheduler
        self._sequence = 0
        self._outgoing: asyncio.Queue[gateway_pb.AgentMessage | None] = asyncio.Queue()
        self._call: Any = None

    async def connect(self, held: tuple[str, ...] = ()) -> None:
        hello = gateway_pb.Hello(
            node=self.node,
            boot_id=self.boot_id,
            instance_id=str(uuid.uuid4()),
            version="0.1.0",
            protocol=1,
            capacity=self.capacity,
            held=[gateway_pb.HeldAttempt(name=name) for name in held],
        )
        self._outgoing = asyncio.Queue()
        await self._outgoing.put(gateway_pb.AgentMessage(hello=hello))
        stub: Any = agent_gateway_pb2_grpc.AgentGatewayStub(self._scheduler.channel)
        self._call = stub.Connect(self._messages(self._outgoing), metadata=self._scheduler.as_("agent"))
        welcome = await self.next()
        assert welcome.WhichOneof("kind") == "welcome"
        await self.heartbeat()

    async def _messages(
        self, queue: asyncio.Queue[gateway_pb.AgentMessage | None]
    ) -> AsyncIterator[gateway_pb.AgentMessage]:
        while (message := await queue.get()) is not None:
            yield message

    async def heartbeat(self, *usage: resources_pb2.AttemptUsage) -> None:
        await self._outgoing.put(gateway_pb.AgentMessage(heartbeat=gateway_pb.Heartbeat(usage=usage)))

    async def next(self) -> gateway_pb.SchedulerMessage:
        async with asyncio.timeout(WAIT_SECONDS):
            message = await self._call.read()
        assert message is not grpc.aio.EOF, "the scheduler ended the stream"
        found: gateway_pb.SchedulerMessage = message
        return found

    async def next_of(self, kind: str) -> Any:
        """The next message of a kind; acknowledgements in between are passed over."""
        while True:
            message = await self.next()
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)
            assert message.WhichOneof("kind") in {"acknowledge", "log_acknowledge"}, message

    async def report(self, attempt: str, status: int, outcome: call_pb2.Outcome | None = None, **fields: Any) -> int:
        self._sequence += 1
        update = gateway_pb.AttemptUpdate(
            sequence=self._sequence,
            attempt=attempt,
            status=call_pb2.AttemptStatus.ValueType(status),
            outcome=outcome,
            **fields,
        )
        await self._outgoing.put(gateway_pb.AgentMessage(update=update))
        return self._sequence

    async def running(self, attempt: str) -> None:
        await self.report(attempt, call_pb2.ATTEMPT_STATUS_RUNNING)

    async def completed(self, attempt: str, result: bytes = b"result") -> None:
        await self.report(attempt, call_pb2.ATTEMPT_STATUS_COMPLETED, call_pb2.Outcome(result={"inline": result}))

    async def failed(self, attempt: str, kind: int, *, never_started: bool = False, message: str = "it broke") -> None:
        failure = call_pb2.Failure(kind=call_pb2.FailureKind.ValueType(kind), message=message)
        await self.report(
            attempt,
            call_pb2.ATTEMPT_STATUS_FAILED,
            call_pb2.Outcome(failure=failure),
            never_started=never_started,
        )

    async def disconnect(self) -> None:
        self._call.cancel()
        await asyncio.wait({asyncio.ensure_future(self._call.code())})


def call_spec(**fields: Any) -> call_pb2.CallSpec:
    """One CPU, 1 GiB, a function by name."""
    compute = {"cpus": 1, "memory_bytes": GIB, **fields.pop("compute", {})}
    return call_pb2.CallSpec(
        function=call_pb2.Function(qualified_name="programs:work", python_version="3.12"),
        arguments={"inline": fields.pop("arguments", b"arguments")},
        image=call_pb2.Image(base="python:3.12-slim"),
        compute=resources_pb2.ComputeSpec(**compute),
        **fields,
    )


@asynccontextmanager
async def running_scheduler(folder: Path, **settings: Any) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(folder, **settings)
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()
