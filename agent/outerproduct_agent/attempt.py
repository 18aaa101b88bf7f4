"""The life of one Attempt on this machine, from its assignment to the update that says how it ended.

    accepted → image, sources, arguments → container → call → (function runs) → outcome → ended → removed → reported

Each phase is on disk before what it stands for is done, so a restarted agent goes on where the last one was: `run` is
entered again and passes over what has been done. The container is never updated, and its CPUs, memory and GPUs come
back only when it is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from outerproduct.v1 import agent_gateway_pb2, payload_pb2, resources_pb2
from outerproduct.v1 import call_pb2 as pb
from outerproduct_agent import archives
from outerproduct_agent.blob_cache import BlobCache
from outerproduct_agent.cgroups import ContainerCgroup, Usage
from outerproduct_agent.container_spec import (
    RESERVED_ENV,
    ContainerRequest,
    ContainerSettings,
    Mount,
    container_spec,
)
from outerproduct_agent.cpuset import format_id_list
from outerproduct_agent.engine import AlreadyThere, ContainerState, Engine, EngineError, LimitDiscarded, NotThere
from outerproduct_agent.images import ImageFailed, ImageStore
from outerproduct_agent.ledger import Allocation
from outerproduct_agent.log_spool import LogSpool
from outerproduct_agent.outcome import Ending, outcome_of
from outerproduct_agent.runner_socket import CallForRunner, RunnerSocket
from outerproduct_agent.scheduler_link import Refused, SchedulerLink
from outerproduct_agent.state import AgentState, Phase, StoredAttempt

log = structlog.get_logger()

SAMPLE_SECONDS = 0.25
"""Between looks at a container's counters: they vanish with its last process."""
EXIT_SECONDS = 10.0
"""For the runner to end after its outcome was received; threads that it leaves behind are killed then."""
DEFAULT_GRACE_SECONDS = 10.0
OOM_SETTLE_SECONDS = 1.0
"""The event comes before the kill that it is about, or without one when memory was freed in time."""
DETAIL_SECONDS = 2.0
"""Progress is reported at most this often."""
GPU_ERRORS = ("nvidia", "cdi", "could not select device driver", "device driver")


@dataclass(frozen=True)
class Machinery:
    """What all Attempts share."""

    node: str
    engine: Engine
    state: AgentState
    images: ImageStore
    blobs: BlobCache
    link: SchedulerLink
    settings: ContainerSettings
    library: Path
    run_folder: Path
    attempts_folder: Path
    starts: asyncio.Semaphore
    """Bounds container starts under way: beyond a few at once only their latency grows."""
    changed: Callable[[], None]
    """Called when there is a new update or output to send."""
    release: Callable[[str], Awaitable[None]]
    """Gives an Attempt's CPUs, memory and GPUs back; its container is gone."""


class NeverStarted(Exception):
    """It failed before the function could have begun."""

    def __init__(self, kind: int, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AttemptLife:
    """One Attempt. `run` returns when it is over and its last update is on disk."""

    def __init__(self, stored: StoredAttempt, machinery: Machinery) -> None:
        self.stored = stored
        self.detail = ""
        self.usage: Usage | None = None
        digest = hashlib.sha256(f"{machinery.node}/{stored.name}".encode()).hexdigest()[:24]
        self.container_name = f"outerproduct-{digest}"
        self._m = machinery
        self._folder = machinery.attempts_folder / digest
        self._run_folder = machinery.run_folder / digest
        self.spool = LogSpool(spool_path(machinery.attempts_folder, stored.name), stored.name)
        self._function: bytes | Path = b""
        self._arguments: bytes | Path = b""
        self._stop = asyncio.Event()
        self._grace_seconds = DEFAULT_GRACE_SECONDS
        self._outcome_here = asyncio.Event()
        self._oom = asyncio.Event()
        self._calling = asyncio.Event()
        self._peak = 0
        self._shm = 0
        self._oom_kills = 0
        self._detail_task: asyncio.Task[None] | None = None
        if stored.stop_kind:
            self._stop.set()
        if stored.outcome is not None:
            self._outcome_here.set()
        if stored.phase >= Phase.CALLING:
            self._calling.set()

    @property
    def status(self) -> int:
        """AttemptStatus as this machine sees it."""
        if self.stored.stop_kind:
            return pb.ATTEMPT_STATUS_CANCELLING
        return pb.ATTEMPT_STATUS_PENDING if self.stored.phase < Phase.CALLING else pb.ATTEMPT_STATUS_RUNNING

    async def stop(self, kind: int, message: str, grace_seconds: float) -> None:
        """Asks for its end; the first reason stays."""
        if not self.stored.stop_kind:
            self.stored.stop_kind, self.stored.stop_message = kind, message
            self._grace_seconds = grace_seconds
            await self._m.state.save(self.stored)
        self._stop.set()

    async def run(self) -> None:
        """See the class."""
        name = self.stored.name
        try:
            ending = await self._live()
            outcome, never_started = outcome_of(ending), self.stored.phase < Phase.CALLING
        except NeverStarted as failed:
            failure = pb.Failure(kind=pb.FailureKind.ValueType(failed.kind), message=str(failed), node=self._m.node)
            outcome, never_started = pb.Outcome(failure=failure), True
        await self._remove()
        # Before the end is reported: the scheduler may give the same CPUs out at once.
        await self._m.release(name)
        if outcome.result.WhichOneof("content") == "blob" or outcome.failure.exception.WhichOneof("content") == "blob":
            await self._upload_payload(outcome)
        update = self.update(_status_of(outcome))
        update.outcome.CopyFrom(outcome)
        update.never_started = never_started
        await self._m.state.finish(name, update)
        self.spool.complete = True
        self._m.changed()
        await asyncio.to_thread(self._clean_folders)
        log.info("attempt_finished", attempt=name, outcome=outcome.WhichOneof("kind"), never_started=never_started)

    def update(self, status: int) -> agent_gateway_pb2.AttemptUpdate:
        """A message about it as it is now."""
        update = agent_gateway_pb2.AttemptUpdate(
            attempt=self.stored.name,
            status=pb.AttemptStatus.ValueType(status),
            allocation=allocation_message(self.stored.allocation),
            container_id=self.stored.container_id,
            detail=self.detail,
        )
        update.happened_at.GetCurrentTime()
        return update

    # The way there.

    async def _live(self) -> Ending:
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(self._make_folders)
            socket = RunnerSocket(
                self._run_folder, self._folder, self.stored.name, self.stored.assign.token, self._m.link, self
            )
            await socket.open()
            stack.push_async_callback(socket.close)
            container = await self._m.engine.inspect(self.container_name)
            if container is None or not container.started:
                container = await self._start_unless_stopped(container)
            if container is None:
                return self._ending(0)
            return await self._follow(container)

    async def _start_unless_stopped(self, container: ContainerState | None) -> ContainerState | None:
        """None when it was asked to stop before its container ran."""
        if self.stored.phase >= Phase.CALLING and container is None:
            # The function may have begun, and nothing is left to ask.
            self._engine_error = f"the container of {self.stored.name} has vanished from {self._m.node}"
            return None
        start = asyncio.create_task(self._start(container))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                return start.result()
            return None
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)

    _engine_error = ""

    async def _start(self, container: ContainerState | None) -> ContainerState:
        spec = self.stored.assign.spec
        try:
            await self._prepare(spec)
            if container is None:
                image = await self._m.images.ensure(spec.image, self.tell)
                if spec.function.by_value and spec.function.python_version != image.python_version:
                    raise NeverStarted(
                        pb.FAILURE_KIND_PYTHON_VERSION_MISMATCH,
                        f"{spec.function.qualified_name} was sent by value from Python {spec.function.python_version}, "
                        f"and image {spec.image.base} has Python {image.python_version}. Use an Image with Python "
                        f"{spec.function.python_version}, or move the function into a module: then it goes by name.",
                    )
                request = ContainerRequest(
                    attempt=self.stored.name,
                    image=image.id,
                    python=image.python,
                    cpus=spec.compute.cpus,
                    allocation=self.stored.allocation,
                    run_folder=str(self._run_folder),
                    library_folder=str(self._m.library),
                    mounts=await self._mounts(spec),
                    env=spec.env_vars,
                )
                self.tell("starting")
                async with self._m.starts:
                    container_id = await self._create(container_spec(request, self._m.settings))
                    self.stored.container_id = container_id
                    await self._m.state.save(self.stored)
                    await self._m.engine.start(container_id)
            else:
                await self._m.engine.start(container.id)
        except ImageFailed as failed:
            raise NeverStarted(failed.kind, str(failed)) from failed
        except LimitDiscarded as failed:
            raise NeverStarted(pb.FAILURE_KIND_NODE_MISCONFIGURED, str(failed)) from failed
        except EngineError as failed:
            raise self._start_failed(failed) from failed
        except Refused as failed:
            raise NeverStarted(
                pb.FAILURE_KIND_CONTAINER_ENGINE, f"what {self.stored.name} needs can not be fetched: {failed}"
            ) from failed
        except (OSError, archives.BadArchive) as failed:
            raise NeverStarted(
                pb.FAILURE_KIND_CONTAINER_ENGINE, f"{self.stored.name} could not be prepared: {failed}"
            ) from failed
        started = await self._m.engine.inspect(self.container_name)
        if started is None:
            raise NeverStarted(pb.FAILURE_KIND_CONTAINER_ENGINE, f"the container of {self.stored.name} has vanished")
        return started

    def _start_failed(self, error: EngineError) -> NeverStarted:
        text = str(error)
        if self.stored.allocation.gpu_uuids and any(word in text.lower() for word in GPU_ERRORS):
            return NeverStarted(
                pb.FAILURE_KIND_NODE_MISCONFIGURED,
                f"Docker can not give GPUs to containers on {self._m.node}: {text}. Install the NVIDIA container "
                "toolkit and restart Docker.",
            )
        return NeverStarted(
            pb.FAILURE_KIND_CONTAINER_ENGINE, f"Docker could not start {self.stored.name} on {self._m.node}: {text}"
        )

    async def _create(self, config: dict[str, Any]) -> str:
        try:
            return await self._m.engine.create(self.container_name, config)
        except AlreadyThere:
            # Left by an agent that died between creating it and writing that down: it was never started.
            await self._m.engine.remove(self.container_name)
            return await self._m.engine.create(self.container_name, config)

    async def _prepare(self, spec: pb.CallSpec) -> None:
        """Sources into the folder that the container sees; function and arguments to where they are sent from."""
        if spec.function.HasField("source"):
            self.tell("fetching its sources")
            archive = await self._m.blobs.get(spec.function.source)
            target = self._run_folder / "source"
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            await asyncio.to_thread(archives.unpack, archive, target)
        self._function = await self._payload(spec.function.pickled)
        self._arguments = await self._payload(spec.arguments)

    async def _payload(self, payload: payload_pb2.Payload) -> bytes | Path:
        if payload.WhichOneof("content") != "blob":
            return payload.inline
        self.tell("fetching its arguments")
        cached = await self._m.blobs.get(payload.blob)
        # A link of its own: the cache may throw its file away before it was sent.
        link = self._folder / payload.blob.sha256
        if not link.exists():
            await asyncio.to_thread(os.link, cached, link)
        return link

    async def _mounts(self, spec: pb.CallSpec) -> tuple[Mount, ...]:
        """Local files of the caller, unpacked once per Attempt."""
        mounts = []
        for number, mount in enumerate(spec.image.mounts):
            self.tell(f"fetching files for {mount.remote_path}")
            content = await self._m.blobs.get(mount.content)
            target = self._folder / f"mount-{number}"
            if mount.is_directory:
                await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
                await asyncio.to_thread(archives.unpack, content, target)
            else:
                await asyncio.to_thread(shutil.copyfile, content, target)
                target.chmod(mount.mode & 0o777 or 0o644)
            mounts.append(Mount(str(target), mount.remote_path))
        return tuple(mounts)

    # What the runner asks (RunnerHandler).

    async def call_for_runner(self, python: str) -> CallForRunner:
        """The Attempt is on record as running before the first byte goes out."""
        if not self._function and not self._arguments:
            await self._prepare(self.stored.assign.spec)
        if self.stored.phase < Phase.CALLING:
            self.stored.phase = Phase.CALLING
            self.stored.started_at = time.time()
            self.detail = ""
            await self._m.state.save(self.stored, self.update(pb.ATTEMPT_STATUS_RUNNING))
            self._m.changed()
            self._calling.set()
        function = self.stored.assign.spec.function
        header = {
            "type": "call",
            "attempt": self.stored.name,
            "number": self.stored.assign.number,
            "function": {
                "qualified_name": function.qualified_name,
                "by_value": function.by_value,
                "wants_client": function.wants_client,
                "python_version": function.python_version,
            },
            "source": function.HasField("source"),
            "function_bytes": _size(self._function),
            "arguments_bytes": _size(self._arguments),
        }
        variables = self.stored.assign.spec.env_vars
        env_vars = {name: value for name, value in variables.items() if name not in RESERVED_ENV}
        return CallForRunner(header, env_vars, self._function, self._arguments)

    async def accepted(self) -> None:
        """The copies that were sent are no longer needed."""
        for part in (self._function, self._arguments):
            if isinstance(part, Path):
                part.unlink(missing_ok=True)

    async def take_outcome(self, outcome: pb.Outcome, payload_file: Path | None) -> None:
        """Stored before the runner is told that it was received; the first one counts."""
        if self.stored.outcome is not None:
            return
        if payload_file is not None:
            await asyncio.to_thread(payload_file.replace, self._folder / "payload")
        self.stored.outcome = outcome.SerializeToString()
        self.stored.phase = Phase.HAS_OUTCOME
        await self._m.state.save(self.stored)
        self._outcome_here.set()

    # While it runs.

    async def _follow(self, container: ContainerState) -> Ending:
        """Until the container has ended, by itself or because it had to."""
        since = self.stored.started_at or time.time()
        logs = asyncio.create_task(self._read_output(container.id), name="logs")
        sampler = asyncio.create_task(self._sample(container), name="sampler")
        exited = asyncio.create_task(self._wait_exit(container), name="exit")
        try:
            await self._until_over(container, exited)
            exit_code = await exited
        finally:
            sampler.cancel()
            exited.cancel()
            await asyncio.gather(sampler, exited, return_exceptions=True)
            if not exited.done() or exited.cancelled():
                logs.cancel()
        final = await self._m.engine.inspect(container.id)
        if final is not None and final.oom_killed:
            self._oom_kills = max(1, self._oom_kills)
        await logs
        ended_by_us = bool(self.stored.stop_kind) or self._oom_kills > 0 or self.stored.outcome is not None
        outside = not ended_by_us and exit_code > 128 and await self._killed_from_outside(container.id, since)
        return self._ending(exit_code, killed_from_outside=outside)

    async def _until_over(self, container: ContainerState, exited: asyncio.Task[int]) -> None:
        """Waits for an end and brings it about where it does not come by itself."""
        timeout_seconds = self.stored.assign.spec.timeout_seconds
        waits: dict[str, asyncio.Task[Any]] = {
            "stop": asyncio.create_task(self._stop.wait()),
            "outcome": asyncio.create_task(self._outcome_here.wait()),
            "oom": asyncio.create_task(self._fatal_oom()),
        }
        if timeout_seconds:
            waits["timeout"] = asyncio.create_task(self._timed_out(timeout_seconds))
        try:
            await asyncio.wait({exited, *waits.values()}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return
            if waits["outcome"].done():
                await asyncio.wait({exited}, timeout=EXIT_SECONDS)
            elif waits["oom"].done():
                log.info("attempt_out_of_memory", attempt=self.stored.name)
            else:
                if not self._stop.is_set():
                    await self.stop(
                        pb.FAILURE_KIND_TIMEOUT,
                        f"{self.stored.name} ran longer than timeout_seconds={timeout_seconds:g}",
                        DEFAULT_GRACE_SECONDS,
                    )
                await self._m.engine.signal(container.id, "SIGTERM")
                await asyncio.wait({exited}, timeout=self._grace_seconds)
            if not exited.done():
                await self._m.engine.signal(container.id, "SIGKILL")
        finally:
            for task in waits.values():
                task.cancel()
            await asyncio.gather(*waits.values(), return_exceptions=True)

    async def _timed_out(self, timeout_seconds: float) -> None:
        await self._calling.wait()  # The bound counts from the start of the function.
        await asyncio.sleep(max(0.0, self.stored.started_at + timeout_seconds - time.time()))

    async def _fatal_oom(self) -> None:
        """Returns when the kernel has killed a process for memory and that must end the Call."""
        while True:
            await self._oom.wait()
            self._oom.clear()
            if self._oom_kills and not self.stored.assign.spec.tolerate_oom_kills:
                return

    async def _sample(self, container: ContainerState) -> None:
        """Looks at the counters as long as there are any."""
        loop = asyncio.get_running_loop()
        if not container.pid:
            return
        try:
            cgroup = ContainerCgroup.of_process(container.pid)
            end_watch = cgroup.watch_oom(loop, lambda: self._look(cgroup))
        except (OSError, KeyError, StopIteration):
            return  # It ended before it could be looked at; Docker's own verdict is asked at the end.
        try:
            while True:
                self._look(cgroup)
                await asyncio.sleep(SAMPLE_SECONDS)
        except OSError:
            return
        finally:
            end_watch()

    def _look(self, cgroup: ContainerCgroup) -> None:
        try:
            usage = cgroup.usage()
        except OSError:
            return
        self.usage = usage
        self._peak = max(self._peak, usage.peak_bytes, usage.memory_bytes)
        if usage.oom_kills > self._oom_kills or not usage.oom_kills:
            self._shm = max(self._shm, usage.shm_bytes) if usage.oom_kills else usage.shm_bytes
        if usage.oom_kills > self._oom_kills:
            self._oom_kills = usage.oom_kills
            self._oom.set()

    async def _wait_exit(self, container: ContainerState) -> int:
        while True:
            try:
                return await self._m.engine.wait_exit(container.id)
            except NotThere:
                self._engine_error = f"the container of {self.stored.name} was removed by somebody else"
                return 0
            except EngineError as error:
                log.warning("engine_away", attempt=self.stored.name, error=str(error))
                await asyncio.sleep(1.0)  # Docker restarts; its containers may live on.

    async def _read_output(self, container_id: str) -> None:
        loop = asyncio.get_running_loop()

        def added() -> None:
            loop.call_soon_threadsafe(self._m.changed)

        def read() -> None:
            with suppress(OSError):
                self.spool.fill(self._m.engine.follow_output(container_id), added)

        await asyncio.to_thread(read)

    async def _killed_from_outside(self, container_id: str, since: float) -> bool:
        try:
            return await self._m.engine.killed_from_outside(container_id, since)
        except EngineError:
            return False

    def _ending(self, exit_code: int, *, killed_from_outside: bool = False) -> Ending:
        said = None if self.stored.outcome is None else pb.Outcome.FromString(self.stored.outcome)
        return Ending(
            attempt=self.stored.name,
            node=self._m.node,
            memory_limit_bytes=self.stored.allocation.memory_bytes,
            said=said,
            exit_code=exit_code,
            oom_kills=self._oom_kills,
            peak_bytes=self._peak,
            shm_bytes=self._shm,
            tolerate_oom_kills=self.stored.assign.spec.tolerate_oom_kills,
            stop_kind=self.stored.stop_kind,
            stop_message=self.stored.stop_message,
            killed_from_outside=killed_from_outside,
            engine_error=self._engine_error,
        )

    # The way out.

    async def _remove(self) -> None:
        """Until it is gone: what a container may still hold is not given to another."""
        pause = 0.5
        while True:
            try:
                await self._m.engine.remove(self.container_name)
            except EngineError as error:
                self.tell(f"its container can not be removed: {error}")
                log.error("container_not_removed", attempt=self.stored.name, error=str(error))  # noqa: TRY400
                await asyncio.sleep(pause)  # Back-off: Docker is away, or a process can not be killed.
                pause = min(pause * 2, 30.0)
            else:
                return

    async def _upload_payload(self, outcome: pb.Outcome) -> None:
        is_result = outcome.WhichOneof("kind") == "result"
        payload = outcome.result if is_result else outcome.failure.exception
        self.tell("sending its result")
        try:
            await self._m.link.upload(self._folder / "payload", payload.blob)
        except (Refused, OSError) as error:
            if not is_result:
                outcome.failure.ClearField("exception")  # Its text is there all the same.
                return
            failure = pb.Failure(
                kind=pb.FAILURE_KIND_RESULT_NOT_SERIALIZABLE,
                message=f"The result of {payload.blob.size_bytes:,} bytes could not be stored: {error}",
                node=self._m.node,
            )
            outcome.CopyFrom(pb.Outcome(failure=failure))

    def _make_folders(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        self._run_folder.chmod(0o755)
        # Mount points must exist in a folder that is mounted read-only.
        (self._run_folder / "lib").mkdir(exist_ok=True)

    def _clean_folders(self) -> None:
        for folder in (self._folder, self._run_folder):
            shutil.rmtree(folder, ignore_errors=True)

    def tell(self, detail: str) -> None:
        """Says what is being done; sent on, but not more often than people can read. May be called from threads."""
        self.detail = detail

    async def report_details(self) -> None:
        """Sends changes of `detail` until the function may begin; the owner of this life runs it beside it."""
        sent = ""
        while self.stored.phase < Phase.CALLING:
            if self.detail != sent:
                sent = self.detail
                await self._m.state.add_update(self.update(pb.ATTEMPT_STATUS_PENDING))
                self._m.changed()
            await asyncio.sleep(DETAIL_SECONDS)


def spool_path(folder: Path, attempt: str) -> Path:
    """Where an Attempt's output waits; the name is readable, so that a restarted agent knows whose it is."""
    return folder / (attempt.replace("/", "~") + ".log")


def attempt_of_spool(path: Path) -> str:
    """The inverse of `spool_path`."""
    return path.name.removesuffix(".log").replace("~", "/")


def allocation_message(allocation: Allocation) -> resources_pb2.Allocation:
    return resources_pb2.Allocation(
        cpu_ids=str(allocation.cpus),
        numa_nodes=format_id_list(allocation.numa_nodes) if allocation.numa_nodes else "",
        gpu_uuids=allocation.gpu_uuids,
        memory_bytes=allocation.memory_bytes,
    )


def _status_of(outcome: pb.Outcome) -> int:
    if outcome.WhichOneof("kind") == "result":
        return pb.ATTEMPT_STATUS_COMPLETED
    cancelled = {pb.FAILURE_KIND_CANCELLED, pb.FAILURE_KIND_PARENT_ENDED}
    return pb.ATTEMPT_STATUS_CANCELLED if outcome.failure.kind in cancelled else pb.ATTEMPT_STATUS_FAILED


def _size(part: bytes | Path) -> int:
    return len(part) if isinstance(part, bytes) else part.stat().st_size
