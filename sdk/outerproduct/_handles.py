"""Run, Call and Attempt: immutable snapshots of what the scheduler knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outerproduct._blocking import Blocking, BlockingValue, elsewhere, run_blocking
from outerproduct._outcome import StoredOutcome, fetch_outcome
from outerproduct._statuses import ENDED, AttemptStatus, CallStatus, RunStatus
from outerproduct._wire import Message, enum_of, time_of

if TYPE_CHECKING:
    from outerproduct._client import OuterProductClient

T = TypeVar("T")


@dataclass(frozen=True)
class LogPiece:
    """A piece of output, as the container wrote it."""

    stream: str
    """ "stdout" or "stderr"."""
    data: bytes
    dropped_bytes: int = 0
    """Bytes that are missing before this piece, because of the size limit."""

    def __str__(self) -> str:
        text = self.data.decode(errors="replace")
        return f"[{self.dropped_bytes} bytes dropped]\n{text}" if self.dropped_bytes else text


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """One dispatch of a Call to a node."""

    name: str
    call: str
    number: int
    status: AttemptStatus
    error_message: str
    created_at: datetime | None
    started_at: datetime | None
    updated_at: datetime | None
    finished_at: datetime | None
    node: str
    exit_code: int | None
    allocation: Message | None
    """What the agent pinned: cpu_ids, numa_nodes, gpu_uuids, memory_bytes."""
    detail: str
    _outcome: Message | None = field(repr=False, compare=False)
    _client: OuterProductClient = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    @elsewhere
    async def refresh(self) -> Attempt[T]:
        """A new snapshot."""
        return attempt_of(await self._client._rpc("RunService/GetAttempt", {"name": self.name}), self._client)

    def result(self) -> T:
        """The value. Raises RunFailed when it ended without one, RuntimeError when it has not ended."""
        if self._outcome is None:
            raise RuntimeError(f"{self.name} has not ended: it is {self.status}")
        stored: StoredOutcome[T] = run_blocking(fetch_outcome(self._outcome, self.name, self._client._transport))
        return stored.value()

    def logs(self, *, follow: bool = False) -> Iterator[LogPiece]:
        """Its output so far; with `follow` until it ends."""
        for piece in self._client._transport.read_logs({"attempt": self.name, "follow": follow}):
            yield LogPiece("stderr" if piece["stream"] == 2 else "stdout", piece["data"], piece["dropped_bytes"])

    def __repr__(self) -> str:
        return f"<Attempt {self.name} {self.status}{f' on {self.node}' if self.node else ''}>"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One invocation of one function."""

    name: str
    run: str
    created_by: str
    parent_call: str
    child_index: int
    volume_mounts: tuple[object, ...]
    function: str
    status: CallStatus
    attempt_count: int
    latest_attempt_name: str
    error_message: str
    created_at: datetime | None
    started_at: datetime | None
    updated_at: datetime | None
    finished_at: datetime | None
    pending_reason: str
    """Why it waits, true when this snapshot was made; empty when it does not wait."""
    _outcome: Message | None = field(repr=False, compare=False)
    _client: OuterProductClient = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    async def _refresh(self) -> Call[T]:
        return call_of(await self._client._rpc("RunService/GetCall", {"name": self.name}), self._client)

    async def _wait(self, timeout: float | None = None) -> StoredOutcome[T]:
        return await wait_for_outcome(self.name, self._outcome, self._client, timeout)

    async def _cancel(self) -> Call[T]:
        return call_of(await self._client._rpc("RunService/CancelCall", {"name": self.name}), self._client)

    refresh = Blocking(_refresh)
    """A new snapshot."""
    wait = BlockingValue(_wait)
    """The value. `timeout` in seconds: None waits for ever, 0 looks once. Raises TimeoutError when it has not ended by
    then (it goes on), RunFailed when it ended without a result."""
    cancel = Blocking(_cancel)
    """Asks for its end and that of its descendants; harmless when it has ended."""

    @elsewhere
    async def children(self) -> list[Call[Any]]:
        """Calls that it has created, in order."""
        return await self._client._list_calls(self.run, parent_call=self.name)

    @elsewhere
    async def attempts(self) -> list[Attempt[T]]:
        """Its Attempts, in order."""
        return await self._client._list_attempts(self.name)

    @elsewhere
    async def latest_attempt(self) -> Attempt[T] | None:
        """Its newest Attempt; None before the first."""
        call = await self._refresh()
        if not call.latest_attempt_name:
            return None
        return attempt_of(
            await self._client._rpc("RunService/GetAttempt", {"name": call.latest_attempt_name}), self._client
        )

    def logs(self, *, follow: bool = False) -> Iterator[LogPiece]:
        """Output of its Attempts, one after another; with `follow` until it ends."""
        seen = 0
        while True:
            call = self.refresh()
            attempts = run_blocking(self._client._list_attempts(self.name))
            for attempt in attempts[seen:]:
                yield from attempt.logs(follow=follow)
            seen = len(attempts)
            if not follow or (call.status.value in ENDED and seen >= call.attempt_count):
                return
            run_blocking(self._client._wait_calls([self.name], 1.0))

    def __repr__(self) -> str:
        waiting = f": {self.pending_reason}" if self.pending_reason else ""
        return f"<Call {self.name} {self.function} {self.status}{waiting}>"


@dataclass(frozen=True)
class Run(Generic[T]):
    """A tree of Calls with one root Call."""

    name: str
    display_name: str
    created_by: str
    created_at: datetime | None
    updated_at: datetime | None
    status: RunStatus
    error_message: str
    root_call: Call[T]
    _client: OuterProductClient = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    async def _refresh(self) -> Run[T]:
        return run_of(await self._client._rpc("RunService/GetRun", {"name": self.name}), self._client)

    async def _wait(self, timeout: float | None = None) -> StoredOutcome[T]:
        return await self.root_call._wait(timeout)

    async def _cancel(self) -> Run[T]:
        return run_of(await self._client._rpc("RunService/CancelRun", {"name": self.name}), self._client)

    refresh = Blocking(_refresh)
    """A new snapshot."""
    wait = BlockingValue(_wait)
    """The value of the root Call; see Call.wait."""
    cancel = Blocking(_cancel)
    """Asks for its end; harmless when it has ended."""

    @elsewhere
    async def calls(self, page_size: int | None = None) -> list[Call[Any]]:
        """All its Calls, in order of creation."""
        return await self._client._list_calls(self.name, page_size=page_size)

    def logs(self, *, follow: bool = False) -> Iterator[LogPiece]:
        """Output of the root Call's Attempts; with `follow` until it ends."""
        return self.root_call.logs(follow=follow)

    def __repr__(self) -> str:
        label = f" {self.display_name!r}" if self.display_name else ""
        reason = self.root_call.pending_reason
        return f"<Run {self.name}{label} {self.root_call.function} {self.status}{f': {reason}' if reason else ''}>"


async def wait_for_outcome(
    name: str, outcome: Message | None, client: OuterProductClient, timeout: float | None
) -> StoredOutcome[Any]:
    """Long polls, each as long as the server allows, until the Call has ended or the deadline has passed."""
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds, 0 or more, or None to wait for ever")
    if outcome is None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            left = client.LONG_POLL_SECONDS if deadline is None else max(0.0, deadline - loop.time())
            answer = await client._wait_calls([name], min(left, client.LONG_POLL_SECONDS))
            if answer["calls"]:
                outcome = answer["calls"][0].get("outcome")
                break
            if deadline is not None and loop.time() >= deadline:
                reason = next((call.get("pending_reason") for call in answer.get("waiting", [])), "")
                raise TimeoutError(
                    f"{name} has not ended after {timeout} s{f' ({reason})' if reason else ''}; it goes on"
                )
    return await fetch_outcome(outcome, name, client._transport)


def attempt_of(message: Message, client: OuterProductClient) -> Attempt[Any]:
    outcome = message.get("outcome")
    failure = (outcome or {}).get("failure")
    return Attempt(
        name=message["name"],
        call=message["call"],
        number=int(message["number"]),
        status=AttemptStatus[enum_of(message["status"], "ATTEMPT_STATUS_")],
        error_message=message.get("error_message", ""),
        created_at=time_of(message.get("created_at")),
        started_at=time_of(message.get("started_at")),
        updated_at=time_of(message.get("updated_at")),
        finished_at=time_of(message.get("finished_at")),
        node=message.get("node", ""),
        exit_code=None if outcome is None else int(failure["exit_code"]) if failure else 0,
        allocation=message.get("allocation"),
        detail=message.get("detail", ""),
        _outcome=outcome,
        _client=client,
    )


def call_of(message: Message, client: OuterProductClient) -> Call[Any]:
    return Call(
        name=message["name"],
        run=message["run"],
        created_by=message.get("created_by", ""),
        parent_call=message.get("parent_call", ""),
        child_index=int(message.get("child_index", 0)),
        volume_mounts=(),
        function=message.get("function", ""),
        status=CallStatus[enum_of(message["status"], "CALL_STATUS_")],
        attempt_count=int(message.get("attempt_count", 0)),
        latest_attempt_name=message.get("latest_attempt", ""),
        error_message=message.get("error_message", ""),
        created_at=time_of(message.get("created_at")),
        started_at=time_of(message.get("started_at")),
        updated_at=time_of(message.get("updated_at")),
        finished_at=time_of(message.get("finished_at")),
        pending_reason=message.get("pending_reason", ""),
        _outcome=message.get("outcome"),
        _client=client,
    )


def run_of(message: Message, client: OuterProductClient) -> Run[Any]:
    return Run(
        name=message["name"],
        display_name=message.get("display_name", ""),
        created_by=message.get("created_by", ""),
        created_at=time_of(message.get("created_at")),
        updated_at=time_of(message.get("updated_at")),
        status=RunStatus[enum_of(message["status"], "RUN_STATUS_")],
        error_message=message.get("error_message", ""),
        root_call=call_of(message["root_call"], client),
        _client=client,
    )
