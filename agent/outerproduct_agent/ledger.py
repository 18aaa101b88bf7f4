"""The agent's account of this machine: what it offers, and which Attempt holds which CPUs, memory and GPUs.

Pure: it decides and remembers, and touches nothing. Containers are made elsewhere from the `Allocation`; the
agent calls `release` only when a container is gone, and feeds readings of the GPUs in through `refresh_gpus`.
It is not thread-safe: one task owns it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from outerproduct_agent import cpus as cpu_policy
from outerproduct_agent.cpuset import CpuSet, format_id_list, parse_id_list
from outerproduct_agent.gpu_groups import choose_group
from outerproduct_agent.gpus import Gpu, GpuHealth, GpuInventory
from outerproduct_agent.spec import ComputeSpec
from outerproduct_agent.topology import Topology

_MIB = 1 << 20

# What the kernel, dockerd, the agent and a login shell need so that a full node still answers; the share
# grows with the machine, as the kernel's own tables and the page cache of image layers do.
_MIN_MEMORY_RESERVE_BYTES = 512 * _MIB
_MEMORY_RESERVE_DIVISOR = 20

# An idle GPU shows up to a few hundred MiB as used (driver context, a desktop's X server); a CUDA program
# that matters holds more.
IDLE_GPU_MEMORY_BYTES = 512 * _MIB


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is pinned for one Attempt.

    Attributes:
        cpus: logical CPUs, nobody else's.
        numa_nodes: nodes that its memory is bound to (`cpuset-mems`); empty when it is not bound.
        gpu_uuids: of GPUs or MIG devices, nobody else's.
        memory_bytes: hard limit.
    """

    cpus: CpuSet
    memory_bytes: int
    gpu_uuids: tuple[str, ...] = ()
    numa_nodes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As JSON values, for a container label."""
        return {
            "cpus": str(self.cpus),
            "numa_nodes": format_id_list(self.numa_nodes),
            "gpu_uuids": list(self.gpu_uuids),
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Allocation:
        """The allocation that `to_json` wrote.

        Raises:
            ValueError: the values are not those of an allocation.
        """
        match values:
            case {
                "cpus": str(cpus),
                "numa_nodes": str(numa_nodes),
                "gpu_uuids": list(gpu_uuids),
                "memory_bytes": int(memory_bytes),
            } if all(isinstance(uuid, str) for uuid in gpu_uuids):
                return cls(
                    cpus=CpuSet.parse(cpus),
                    memory_bytes=memory_bytes,
                    gpu_uuids=tuple(gpu_uuids),
                    numa_nodes=tuple(sorted(parse_id_list(numa_nodes))),
                )
        raise ValueError(f"not an allocation: {values!r}")


@dataclass(frozen=True, slots=True)
class Declined:
    """Why this machine cannot take an Attempt now: what was asked, what is free, and what is in the way."""

    reason: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """An amount of what a machine has: logical CPUs, bytes of memory, GPUs by canonical type."""

    cpus: int
    memory_bytes: int
    gpus: Mapping[str, int]


class GpuState(enum.Enum):
    """What the ledger makes of a GPU."""

    FREE = "free"
    ALLOCATED = "allocated"
    # Its Attempt has ended, but its memory has not been seen free since.
    RELEASING = "releasing"
    UNHEALTHY = "unhealthy"
    EXCLUDED = "excluded"
    # Used by a process outside our containers.
    FOREIGN_USE = "foreign use"


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU with its state, why it cannot be given out (empty when it can), and the Attempt that holds it."""

    gpu: Gpu
    state: GpuState
    reason: str = ""
    attempt: str = ""


def default_memory_reserve_bytes(memory_bytes: int) -> int:
    """Memory to keep for the system where the operator says nothing: 5 %, at least 512 MiB."""
    return max(_MIN_MEMORY_RESERVE_BYTES, memory_bytes // _MEMORY_RESERVE_DIVISOR)


class Ledger:
    """Who holds what on this machine. Whatever is called in whatever order, nothing is given out twice."""

    def __init__(
        self,
        topology: Topology,
        gpus: GpuInventory,
        memory_bytes: int,
        *,
        reserve_cpus: int | None = None,
        reserve_memory_bytes: int | None = None,
        ignore_foreign_use: bool = False,
        bind_memory: bool = True,
    ) -> None:
        """An account without Attempts.

        Args:
            topology: the machine's processors.
            gpus: the first reading of its GPUs.
            memory_bytes: what the machine (or the agent's own cgroup) has.
            reserve_cpus: logical CPUs that the system keeps; by default as `cpus.default_reserve_count` says.
            reserve_memory_bytes: memory that the system keeps; by default as `default_memory_reserve_bytes`
                says.
            ignore_foreign_use: give out GPUs that processes outside our containers use.
            bind_memory: bind the memory of an Attempt to its NUMA node where it fits there.

        Raises:
            ValueError: a reserve is negative or leaves nothing.
        """
        if reserve_cpus is None:
            reserve_cpus = cpu_policy.default_reserve_count(topology)
        if reserve_memory_bytes is None:
            reserve_memory_bytes = default_memory_reserve_bytes(memory_bytes)
        if not 0 <= reserve_memory_bytes < memory_bytes:
            raise ValueError(
                f"a memory reserve of {reserve_memory_bytes} bytes leaves nothing of {memory_bytes}: "
                "set one from 0 to less than that"
            )
        self._topology = topology
        self._memory_bytes = memory_bytes - reserve_memory_bytes
        self._reserve_memory_bytes = reserve_memory_bytes
        self._cpus = topology.usable - cpu_policy.reserve(topology, reserve_cpus)
        self._ignore_foreign_use = ignore_foreign_use
        self._bind_memory = bind_memory
        self._inventory = gpus
        self._allocations: dict[str, Allocation] = {}
        self._gpu_holders: dict[str, str] = {}
        self._releasing: set[str] = set()

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """What is given out, by Attempt name (a copy)."""
        return dict(self._allocations)

    @property
    def cpus(self) -> CpuSet:
        """CPUs that Attempts may use: the usable ones without the reserve."""
        return self._cpus

    @property
    def free_cpus(self) -> CpuSet:
        """Of `cpus`, those that no Attempt holds."""
        free = self._cpus
        for allocation in self._allocations.values():
            free -= allocation.cpus
        return free

    @property
    def free_memory_bytes(self) -> int:
        """Memory that no Attempt holds; 0 where adopted Attempts hold more than is offered now."""
        held = sum(allocation.memory_bytes for allocation in self._allocations.values())
        return max(self._memory_bytes - held, 0)

    def allocate(self, attempt_name: str, spec: ComputeSpec) -> Allocation | Declined:
        """Pin what the Attempt asks for, all of it or nothing.

        Asking again for an Attempt that has its allocation returns that one.
        """
        if existing := self._allocations.get(attempt_name):
            return existing
        free_cpus = self.free_cpus
        if spec.cpus > len(free_cpus):
            return Declined(f"{spec.cpus} CPUs asked for, {len(free_cpus)} of {len(self._cpus)} free")
        if spec.memory_bytes > self.free_memory_bytes:
            return Declined(
                f"{_mib(spec.memory_bytes)} of memory asked for, {_mib(self.free_memory_bytes)} of "
                f"{_mib(self._memory_bytes)} free"
            )
        gpus = self._choose_gpus(spec, free_cpus)
        if isinstance(gpus, Declined):
            return gpus
        preferred_numa = {gpu.numa_node for gpu in gpus if gpu.numa_node >= 0} or {
            node.id for node in self._topology.numa_nodes if self._fits_node(node.id, spec.memory_bytes)
        }
        chosen = cpu_policy.allocate(self._topology, free_cpus, spec.cpus, preferred_numa)
        allocation = Allocation(
            cpus=chosen,
            memory_bytes=spec.memory_bytes,
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            numa_nodes=self._nodes_to_bind(chosen, spec.memory_bytes),
        )
        self._record(attempt_name, allocation)
        return allocation

    def adopt(self, attempt_name: str, allocation: Allocation) -> None:
        """Take over what a container of before a restart of the agent holds.

        It is recorded even where it exceeds what is offered now (a larger reserve, a GPU that is gone): the
        container has it.

        Raises:
            ValueError: another Attempt holds part of it, or this one holds something else.
        """
        existing = self._allocations.get(attempt_name)
        if existing == allocation:
            return
        if existing is not None:
            raise ValueError(f"{attempt_name} cannot be adopted: it already holds {existing}")
        for other_name, other in self._allocations.items():
            shared_gpus = set(other.gpu_uuids) & set(allocation.gpu_uuids)
            if shared_gpus or not other.cpus.isdisjoint(allocation.cpus):
                what = ", ".join(sorted(shared_gpus)) or f"CPUs {other.cpus & allocation.cpus}"
                raise ValueError(f"{attempt_name} cannot be adopted: {other_name} holds {what} too, stop one of them")
        self._record(attempt_name, allocation)

    def release(self, attempt_name: str) -> Allocation | None:
        """Give back what an Attempt holds; call it only when its container is gone.

        CPUs and memory are free at once. GPUs are free when a later reading shows them idle.

        Returns:
            What it held, `None` if it held nothing.
        """
        allocation = self._allocations.pop(attempt_name, None)
        if allocation is not None:
            for uuid in allocation.gpu_uuids:
                del self._gpu_holders[uuid]
            self._releasing.update(allocation.gpu_uuids)
        return allocation

    def refresh_gpus(self, inventory: GpuInventory) -> None:
        """Take in a reading of the GPUs, begun after the latest `release`.

        GPUs that were released and are idle in it become free; one that did not tell its use is not taken for
        idle. With `ignore_foreign_use` idleness cannot be told, and all that answered become free.
        """
        self._inventory = inventory
        self._releasing &= {
            gpu.uuid for gpu in inventory.gpus if not gpu.use_known or (_use(gpu) and not self._ignore_foreign_use)
        }

    def gpu_statuses(self) -> tuple[GpuStatus, ...]:
        """All GPUs of the latest reading with their states."""
        return tuple(self._status(gpu) for gpu in self._inventory.gpus)

    def totals(self) -> Capacity:
        """What the machine offers, free or not: no reserve, no unhealthy or excluded GPUs."""
        return Capacity(len(self._cpus), self._memory_bytes, self._count(_OFFERED_STATES))

    def allocated(self) -> Capacity:
        """What Attempts hold; like `totals` without GPUs that have become unhealthy."""
        cpus = sum(len(allocation.cpus) for allocation in self._allocations.values())
        memory_bytes = sum(allocation.memory_bytes for allocation in self._allocations.values())
        return Capacity(cpus, memory_bytes, self._count({GpuState.ALLOCATED}))

    def free(self) -> Capacity:
        """What could be given out now."""
        return Capacity(len(self.free_cpus), self.free_memory_bytes, self._count({GpuState.FREE}))

    def _record(self, attempt_name: str, allocation: Allocation) -> None:
        self._allocations[attempt_name] = allocation
        self._gpu_holders.update(dict.fromkeys(allocation.gpu_uuids, attempt_name))

    def _count(self, states: set[GpuState]) -> dict[str, int]:
        return dict(Counter(status.gpu.type for status in self.gpu_statuses() if status.state in states))

    def _status(self, gpu: Gpu) -> GpuStatus:
        holder = self._gpu_holders.get(gpu.uuid, "")
        if gpu.health is GpuHealth.UNHEALTHY:
            return GpuStatus(gpu, GpuState.UNHEALTHY, gpu.reason, holder)
        if holder:
            return GpuStatus(gpu, GpuState.ALLOCATED, "held by an Attempt", holder)
        if gpu.excluded:
            return GpuStatus(gpu, GpuState.EXCLUDED, gpu.excluded)
        use = _use(gpu)
        if gpu.uuid in self._releasing:
            return GpuStatus(gpu, GpuState.RELEASING, f"its last Attempt has ended, {use or 'not seen idle yet'}")
        if use and not self._ignore_foreign_use:
            return GpuStatus(gpu, GpuState.FOREIGN_USE, f"{use}, not by a container of this agent")
        return GpuStatus(gpu, GpuState.FREE)

    def _choose_gpus(self, spec: ComputeSpec, free_cpus: CpuSet) -> tuple[Gpu, ...] | Declined:
        if not spec.accelerator_count:
            return ()
        statuses = [status for status in self.gpu_statuses() if status.gpu.type == spec.accelerator]
        free = [status.gpu for status in statuses if status.state is GpuState.FREE]
        if spec.accelerator_count > len(free):
            obstacles = "".join(
                f"; {status.gpu.uuid}: {status.reason}" for status in statuses if status.state is not GpuState.FREE
            )
            return Declined(
                f"{spec.accelerator_count} x {spec.accelerator} asked for, "
                f"{len(free)} of {len(statuses)} free{obstacles}"
            )

        def order(gpu: Gpu) -> tuple[bool, int]:
            cpus_near = sum(self._topology.by_id[cpu].numa_node == gpu.numa_node for cpu in free_cpus)
            return (gpu.numa_node >= 0 and cpus_near < spec.cpus, gpu.index)

        by_uuid = {gpu.uuid: gpu for gpu in sorted(free, key=order)}
        group = choose_group(tuple(by_uuid), spec.accelerator_count, self._inventory.links)
        return tuple(by_uuid[uuid] for uuid in group)

    def _nodes_to_bind(self, cpus: CpuSet, memory_bytes: int) -> tuple[int, ...]:
        """The one NUMA node of these CPUs if the memory fits there, else none.

        The kernel kills in a bound container whose node is full though others are not, while one that is not
        bound gets local memory first anyway: hence the caution of `_fits_node`. What no account can rule out is
        an Attempt that comes later, is too large for any node, and spills over onto this one.
        """
        nodes = self._topology.nodes_of(cpus)
        nodes_with_memory = sum(node.memory_bytes > 0 for node in self._topology.numa_nodes)
        if not self._bind_memory or len(nodes) != 1 or nodes_with_memory < 2:
            return ()
        return nodes if self._fits_node(nodes[0], memory_bytes) else ()

    def _fits_node(self, node_id: int, memory_bytes: int) -> bool:
        """Whether the memory fits this NUMA node even if all memory of Attempts that are not bound, and all of
        the reserve, lay there."""
        size_bytes = sum(node.memory_bytes for node in self._topology.numa_nodes if node.id == node_id)
        charged_bytes = self._reserve_memory_bytes + sum(
            allocation.memory_bytes
            for allocation in self._allocations.values()
            if not allocation.numa_nodes or node_id in allocation.numa_nodes
        )
        return charged_bytes + memory_bytes <= size_bytes


_OFFERED_STATES = {GpuState.FREE, GpuState.ALLOCATED, GpuState.RELEASING, GpuState.FOREIGN_USE}


def _use(gpu: Gpu) -> str:
    """Who uses the GPU, in words; empty when it is idle."""
    if gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes)
        return f"in use by process {pids} ({_mib(gpu.memory_used_bytes)})"
    if gpu.memory_used_bytes > IDLE_GPU_MEMORY_BYTES:
        return f"{_mib(gpu.memory_used_bytes)} of its memory in use"
    return ""


def _mib(number_bytes: int) -> str:
    return f"{number_bytes / _MIB:.0f} MiB"
