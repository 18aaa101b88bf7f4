"""The node agent: what the scheduler's messages mean here, and who owns which background work.

Everything lives in one TaskGroup: the death of a part ends the agent with an error, and systemd starts it again; the
containers run on meanwhile. Attempts are the exception: one that fails in a way that nobody foresaw is reported as
failed, and the others go on.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import time
import uuid
from pathlib import Path

import structlog

import outerproduct
from outerproduct.v1 import agent_gateway_pb2 as gateway_pb
from outerproduct.v1 import call_pb2 as pb
from outerproduct.v1 import resources_pb2
from outerproduct_agent.attempt import AttemptLife, Machinery, allocation_message, attempt_of_spool
from outerproduct_agent.blob_cache import BlobCache
from outerproduct_agent.cgroups import cgroup_version
from outerproduct_agent.config import AgentConfig
from outerproduct_agent.container_spec import AGENT_LABEL, ATTEMPT_LABEL, NOFILE_LIMIT, ContainerSettings
from outerproduct_agent.discovery import MachineInventory, discover
from outerproduct_agent.engine import Engine, EngineError
from outerproduct_agent.gateway import Gateway
from outerproduct_agent.gpu_health import GpuMonitor
from outerproduct_agent.gpus import GpuOffer
from outerproduct_agent.images import BuildSettings, ImageStore
from outerproduct_agent.ledger import Declined, GpuState, Ledger
from outerproduct_agent.log_shipper import LogShipper
from outerproduct_agent.log_spool import LogSpool
from outerproduct_agent.rlimits import UNLIMITED, grantable
from outerproduct_agent.runtime_library import prepare_library
from outerproduct_agent.scheduler_link import SchedulerLink
from outerproduct_agent.spec import ComputeSpec
from outerproduct_agent.state import AgentState, Phase, StoredAttempt

log = structlog.get_logger()

ORPHAN_GRACE_SECONDS = 10.0
"""Containers with our label and without a record here are removed so long after the start."""
ENGINE_LOOK_SECONDS = 5.0
GPU_LOOK_SECONDS = 10.0
GPU_RELEASE_LOOKS = 40
GPU_RELEASE_LOOK_SECONDS = 0.25
"""After an Attempt with GPUs, the driver takes a moment to free their memory."""
LEASE_LOOK_SECONDS = 1.0
STOP_GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL when it is the agent that ends an Attempt."""

_GPU_STATES = {
    GpuState.FREE: resources_pb2.GPU_STATE_FREE,
    GpuState.ALLOCATED: resources_pb2.GPU_STATE_ALLOCATED,
    GpuState.RELEASING: resources_pb2.GPU_STATE_RELEASING,
    GpuState.UNHEALTHY: resources_pb2.GPU_STATE_UNHEALTHY,
    GpuState.EXCLUDED: resources_pb2.GPU_STATE_EXCLUDED,
    GpuState.FOREIGN_USE: resources_pb2.GPU_STATE_FOREIGN_USE,
}


class Agent:
    """One machine. `run` lasts until `stop` is set."""

    def __init__(self, config: AgentConfig, link: SchedulerLink) -> None:
        self.config = config
        self.instance_id = str(uuid.uuid4())
        self.started_at = time.time()
        self.docker_version = ""
        self.not_ready_reason = "starting"
        self.lives: dict[str, AttemptLife] = {}
        self.inventory: MachineInventory
        self.ledger: Ledger
        self.state = AgentState(config.data_dir / "agent.sqlite3")
        self.engine = Engine(config.docker_host or None)
        self.agent_id = _persistent_id(config.data_dir / "agent-id")
        self.network = f"outerproduct-{config.node_name[:100]}-{self.agent_id[:8]}"
        self._link = link
        self._shipper = LogShipper()
        self._monitor: GpuMonitor | None = None
        self._gpu_lock = asyncio.Lock()
        self._machinery: Machinery
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.gateway = Gateway(
            link, self.state, self._shipper, hello=self.hello, heartbeat=self.heartbeat, handle=self.handle
        )

    async def prepare(self) -> None:
        """Looks at the machine and takes up what an earlier agent has left."""
        folder = self.config.data_dir
        offer = GpuOffer.parse(self.config.gpus)
        self.inventory = await asyncio.to_thread(discover, offer=offer)
        self.ledger = Ledger(
            self.inventory.topology,
            self.inventory.gpus,
            self.inventory.memory_bytes,
            reserve_cpus=self.config.reserve_cpus,
            reserve_memory_bytes=self.config.reserve_memory_bytes,
        )
        # Also without GPUs now: the driver may come up after the agent.
        if self.config.gpus != "none":
            self._monitor = await asyncio.to_thread(lambda: GpuMonitor(offer=offer))
        await self.state.open()
        attempts_folder = folder / "attempts"
        attempts_folder.mkdir(exist_ok=True, mode=0o700)
        images = ImageStore(
            self.engine,
            self.state,
            BuildSettings(
                self.network, self.config.ca_bundle, self.config.package_index, self.config.registry_auth_file
            ),
        )
        self._machinery = Machinery(
            node=self.config.node_name,
            engine=self.engine,
            state=self.state,
            images=images,
            blobs=BlobCache(folder / "blobs", self._link),
            link=self._link,
            settings=ContainerSettings(
                node=self.config.node_name,
                agent_id=self.agent_id,
                network=self.network,
                cgroup_v2=cgroup_version() == 2,
                nofile_limit=grantable(resource.RLIMIT_NOFILE, NOFILE_LIMIT),
                memlock_limit=grantable(resource.RLIMIT_MEMLOCK, UNLIMITED),
            ),
            library=await asyncio.to_thread(prepare_library, folder / "lib"),
            run_folder=folder / "run",
            attempts_folder=attempts_folder,
            starts=asyncio.Semaphore(max(2, os.cpu_count() or 2)),
            changed=self.gateway.changed,
            release=self._release,
        )
        for path in attempts_folder.glob("*.log"):
            spool = await asyncio.to_thread(LogSpool, path, attempt_of_spool(path))
            spool.complete = True
            self._shipper.add(attempt_of_spool(path), spool)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises what kills a part."""
        # Before the first hello: what is not in its inventory counts as lost.
        await self._adopt()
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(self._watch_engine(), name="engine"),
                group.create_task(self._remove_orphans_later(), name="orphans"),
                group.create_task(self._watch_gpus(), name="gpus"),
                group.create_task(self._watch_lease(), name="lease"),
                group.create_task(self.gateway.run(), name="gateway"),
            ]
            await stop.wait()
            if self.config.stop_attempts_on_exit:
                await self._stop_everything()
            for task in (*parts, *self._tasks.values()):
                task.cancel()

    async def close(self) -> None:
        if self.config.stop_attempts_on_exit and not self.not_ready_reason:
            try:
                await self.engine.remove_network(self.network)
            except EngineError as error:
                log.warning("network_not_removed", network=self.network, error=str(error))
            await asyncio.to_thread(shutil.rmtree, self.config.data_dir / "run", ignore_errors=True)
        if self._monitor is not None:
            await asyncio.to_thread(self._monitor.close)
        await self.state.close()
        self.engine.close()

    # What the scheduler hears.

    async def hello(self) -> gateway_pb.Hello:
        """What this node is and holds."""
        held = [
            gateway_pb.HeldAttempt(
                name=name,
                status=pb.AttemptStatus.ValueType(life.status),
                allocation=allocation_message(life.stored.allocation),
            )
            for name, life in self.lives.items()
        ]
        reported = await self.state.unacknowledged_attempts() - self.lives.keys()
        held += [gateway_pb.HeldAttempt(name=name) for name in sorted(reported)]
        return gateway_pb.Hello(
            node=self.config.node_name,
            boot_id=self.inventory.boot_id,
            instance_id=self.instance_id,
            version=outerproduct.__version__,
            protocol=1,
            capacity=self.capacity(),
            gpus=self.gpu_messages(),
            held=held,
            not_ready_reason=self.not_ready_reason,
        )

    def heartbeat(self) -> gateway_pb.Heartbeat:
        """How it is now."""
        beat = gateway_pb.Heartbeat(
            capacity=self.capacity(), gpus=self.gpu_messages(), not_ready_reason=self.not_ready_reason
        )
        beat.sent_at.GetCurrentTime()
        for name, life in self.lives.items():
            if life.usage is not None:
                beat.usage.add(
                    name=name,
                    cpu_seconds=life.usage.cpu_seconds,
                    memory_bytes=life.usage.memory_bytes,
                    shm_bytes=life.usage.shm_bytes,
                )
        return beat

    def capacity(self) -> resources_pb2.MachineCapacity:
        """What this node offers in all."""
        totals = self.ledger.totals()
        return resources_pb2.MachineCapacity(
            cpus=totals.cpus, memory_bytes=totals.memory_bytes, accelerators=dict(totals.gpus)
        )

    def gpu_messages(self) -> list[resources_pb2.Gpu]:
        """Every GPU with its state."""
        return [
            resources_pb2.Gpu(
                uuid=status.gpu.uuid,
                type=status.gpu.type,
                product_name=status.gpu.product_name,
                pci_bus_id=status.gpu.pci_bus_id,
                numa_node=status.gpu.numa_node,
                memory_bytes=status.gpu.memory_bytes,
                state=_GPU_STATES[status.state],
                reason=status.reason,
                index=status.gpu.index,
                attempt=status.attempt,
            )
            for status in self.ledger.gpu_statuses()
        ]

    # What the scheduler says.

    async def handle(self, message: gateway_pb.SchedulerMessage) -> None:
        """An assignment or a cancellation; both may come again."""
        kind = message.WhichOneof("kind")
        if kind == "assign":
            await self._assigned(message.assign)
        elif kind == "cancel":
            await self._cancelled(message.cancel)
        else:
            log.warning("message_ignored", kind=kind)

    async def _assigned(self, assign: gateway_pb.Assign) -> None:
        name = assign.attempt
        if name in self.lives or name in await self.state.unacknowledged_attempts():
            return
        compute = assign.spec.compute
        spec = ComputeSpec(compute.cpus, compute.memory_bytes, assign.accelerator, compute.accelerator_count)
        granted = Declined(self.not_ready_reason) if self.not_ready_reason else self.ledger.allocate(name, spec)
        if isinstance(granted, Declined):
            log.warning("attempt_declined", attempt=name, reason=granted.reason)
            await self._report(
                name,
                pb.ATTEMPT_STATUS_FAILED,
                pb.FAILURE_KIND_DECLINED,
                f"{self.config.node_name} declined: {granted.reason}",
            )
            return
        stored = StoredAttempt(assign, granted)
        await self.state.save(stored)
        log.info("attempt_accepted", attempt=name, cpus=str(granted.cpus), gpus=granted.gpu_uuids)
        self._begin(stored)

    async def _cancelled(self, cancel: gateway_pb.CancelAttempt) -> None:
        life = self.lives.get(cancel.attempt)
        if life is not None:
            await life.stop(cancel.reason, cancel.message, cancel.grace_seconds)
        elif cancel.attempt not in await self.state.unacknowledged_attempts():
            await self._report(cancel.attempt, pb.ATTEMPT_STATUS_CANCELLED, cancel.reason, cancel.message)

    async def _report(self, name: str, status: int, kind: int, message: str) -> None:
        """The end of an Attempt that has no life here."""
        failure = pb.Failure(kind=pb.FailureKind.ValueType(kind), message=message, node=self.config.node_name)
        update = gateway_pb.AttemptUpdate(
            attempt=name,
            status=pb.AttemptStatus.ValueType(status),
            outcome=pb.Outcome(failure=failure),
            never_started=True,
        )
        await self.state.add_update(update)
        self.gateway.changed()

    # Attempts.

    def _begin(self, stored: StoredAttempt) -> None:
        life = AttemptLife(stored, self._machinery)
        self.lives[stored.name] = life
        self._shipper.add(stored.name, life.spool)
        self._tasks[stored.name] = asyncio.create_task(self._run_life(life), name=stored.name)

    async def _run_life(self, life: AttemptLife) -> None:
        name = life.stored.name
        reporting = asyncio.create_task(life.report_details())
        try:
            await life.run()
        except Exception as error:
            # A fault of ours: this Attempt has failed, the others go on.
            log.exception("attempt_failed_unforeseen", attempt=name)
            await self.engine.remove(life.container_name)
            await self._release(name)
            failure = pb.Failure(
                kind=pb.FAILURE_KIND_CONTAINER_ENGINE,
                message=f"the agent on {self.config.node_name} failed: {type(error).__name__}: {error}",
                node=self.config.node_name,
            )
            update = life.update(pb.ATTEMPT_STATUS_FAILED)
            update.outcome.failure.CopyFrom(failure)
            update.never_started = life.stored.phase < Phase.CALLING
            await self.state.finish(name, update)
            life.spool.complete = True
        finally:
            reporting.cancel()
        self.lives.pop(name, None)
        self._tasks.pop(name, None)
        self.gateway.changed()

    async def _release(self, name: str) -> None:
        # Never during a reading of the GPUs: it would be taken for one that has seen them after the release.
        async with self._gpu_lock:
            allocation = self.ledger.release(name)
        if allocation is not None and allocation.gpu_uuids:
            await self._until_gpus_are_free(set(allocation.gpu_uuids))

    async def _until_gpus_are_free(self, uuids: set[str]) -> None:
        """The driver frees memory a moment after the process is gone; one that takes longer is told as RELEASING."""
        for _ in range(GPU_RELEASE_LOOKS):
            await self._look_at_gpus()
            held = {s.gpu.uuid for s in self.ledger.gpu_statuses() if s.state is GpuState.RELEASING}
            if not held & uuids:
                return
            await asyncio.sleep(GPU_RELEASE_LOOK_SECONDS)
        self.gateway.beat()

    async def _adopt(self) -> None:
        """Goes on with the Attempts of an earlier agent."""
        rebooted = await asyncio.to_thread(_boot_changed, self.config.data_dir / "boot_id", self.inventory.boot_id)
        for stored in await self.state.load():
            self.ledger.adopt(stored.name, stored.allocation)
            if rebooted and stored.phase == Phase.CALLING and not stored.stop_kind:
                stored.stop_kind = pb.FAILURE_KIND_NODE_LOST
                stored.stop_message = f"{self.config.node_name} was booted while {stored.name} was running"
            log.info("attempt_adopted", attempt=stored.name, phase=stored.phase.name)
            self._begin(stored)

    async def _remove_orphans_later(self) -> None:
        await asyncio.sleep(ORPHAN_GRACE_SECONDS)  # Not a wait for something: a grace period.
        await self._remove_orphans()

    async def _remove_orphans(self) -> None:
        try:
            containers = await self.engine.list_containers(f"{AGENT_LABEL}={self.agent_id}")
            for container_id, labels in containers.items():
                if labels.get(ATTEMPT_LABEL) not in self.lives:
                    log.warning("orphan_removed", attempt=labels.get(ATTEMPT_LABEL), container=container_id[:12])
                    await self.engine.remove(container_id)
        except EngineError as error:
            log.warning("orphans_not_removed", error=str(error))

    async def _stop_everything(self) -> None:
        for life in list(self.lives.values()):
            await life.stop(pb.FAILURE_KIND_NODE_LOST, f"{self.config.node_name} was shut down", STOP_GRACE_SECONDS)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        await self._remove_orphans()

    # Watches.

    async def _watch_engine(self) -> None:
        """Whether Docker answers decides whether this node takes Attempts."""
        while True:
            try:
                self.docker_version = await self.engine.version()
                await self.engine.ensure_network(self.network)
                reason = ""
            except EngineError as error:
                self.docker_version = ""
                reason = str(error)
            if reason != self.not_ready_reason:
                log.info("readiness_changed", reason=reason or "ready")
                self.not_ready_reason = reason
                self.gateway.beat()
            await asyncio.sleep(ENGINE_LOOK_SECONDS)

    async def _watch_gpus(self) -> None:
        if self._monitor is None:
            return
        while True:
            await self._look_at_gpus()
            await asyncio.sleep(GPU_LOOK_SECONDS)

    async def _look_at_gpus(self) -> None:
        if self._monitor is None:
            return
        async with self._gpu_lock:
            before = self.ledger.gpu_statuses()
            inventory = await asyncio.to_thread(self._monitor.poll)
            self.ledger.refresh_gpus(inventory)
        if self.ledger.gpu_statuses() != before:
            self.gateway.beat()

    async def _watch_lease(self) -> None:
        """Cut off for longer than the lease, Attempts that the scheduler may start elsewhere are given up here."""
        while True:
            await asyncio.sleep(LEASE_LOOK_SECONDS)
            away = 0.0 if self.gateway.connected else time.monotonic() - self.gateway.last_connected
            if away <= self.gateway.lease_seconds:
                continue
            for life in list(self.lives.values()):
                if may_be_repeated(life.stored) and not life.stored.stop_kind and life.stored.outcome is None:
                    await life.stop(
                        pb.FAILURE_KIND_NODE_LOST,
                        f"{self.config.node_name} was cut off from the scheduler for {away:.0f} s",
                        STOP_GRACE_SECONDS,
                    )


def may_be_repeated(stored: StoredAttempt) -> bool:
    """Whether the scheduler may start another Attempt of the Call when this node is lost."""
    if stored.phase < Phase.CALLING:
        return True
    return stored.assign.spec.retry_strategy.max_attempts > 1


def _persistent_id(path: Path) -> str:
    """The id of the agent that works in a data folder; made at its first start."""
    try:
        return path.read_text()
    except FileNotFoundError:
        made = uuid.uuid4().hex
        path.write_text(made)
        return made


def _boot_changed(path: Path, boot_id: str) -> bool:
    """Whether the machine was booted since the last agent, and remembers the boot."""
    try:
        before = path.read_text()
    except FileNotFoundError:
        before = boot_id
    path.write_text(boot_id)
    return before != boot_id
