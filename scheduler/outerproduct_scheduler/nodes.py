"""What the scheduler knows of each machine, and how users see it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from outerproduct.v1 import agent_gateway_pb2, node_service_pb2, resources_pb2
from outerproduct_scheduler.placement import NodeCapacity, NodeCondition

MAX_QUEUED_MESSAGES = 10_000
"""For one agent. One that does not read is cut off; what it needs is sent again when it says hello."""
FAILURES_TO_QUARANTINE = 3
"""Starts that fail one after another: a machine that fails fast would otherwise attract and ruin everything."""
FIRST_QUARANTINE_SECONDS = 30.0
LONGEST_QUARANTINE_SECONDS = 900.0

_PB_CONDITION = {
    NodeCondition.READY: node_service_pb2.NODE_CONDITION_READY,
    NodeCondition.CORDONED: node_service_pb2.NODE_CONDITION_CORDONED,
    NodeCondition.DRAINING: node_service_pb2.NODE_CONDITION_DRAINING,
    NodeCondition.UNREACHABLE: node_service_pb2.NODE_CONDITION_UNREACHABLE,
    NodeCondition.QUARANTINED: node_service_pb2.NODE_CONDITION_QUARANTINED,
}


class Session:
    """The stream of one agent, as the controller sees it: messages go in, `closed` says when it has ended."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.outgoing: asyncio.Queue[agent_gateway_pb2.SchedulerMessage] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self.closed = asyncio.Event()
        self.accepted = asyncio.Event()

    def send(self, message: agent_gateway_pb2.SchedulerMessage) -> None:
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.closed.set()


@dataclass(slots=True)
class NodeState:
    """One machine."""

    name: str
    boot_id: str = ""
    agent_version: str = ""
    capacity: resources_pb2.MachineCapacity = field(default_factory=resources_pb2.MachineCapacity)
    gpus: list[resources_pb2.Gpu] = field(default_factory=list)
    agent_labels: dict[str, str] = field(default_factory=dict)
    operator_labels: dict[str, str] = field(default_factory=dict)
    cordoned: bool = False
    draining: bool = False
    drain_deadline: float | None = None
    reason: str = ""
    not_ready_reason: str = ""
    session: Session | None = None
    last_seen: float = 0.0
    """By the wall clock, for people."""
    heard: float = 0.0
    """By the monotonic clock, which leases are decided by: the wall clock may jump."""
    usage: dict[str, resources_pb2.AttemptUsage] = field(default_factory=dict)
    """Of its Attempts by name, as the last heartbeat told."""
    told_to_stop: set[str] = field(default_factory=set)
    """Attempts that were asked to stop since the drain's deadline passed."""
    lost: bool = False
    failures_in_a_row: int = 0
    quarantined_until: float = 0.0
    last_failure: str = ""

    @property
    def labels(self) -> dict[str, str]:
        return {**self.agent_labels, **self.operator_labels}

    def condition(self, now: float) -> NodeCondition:
        if self.session is None:
            return NodeCondition.UNREACHABLE
        if self.draining:
            return NodeCondition.DRAINING
        if self.cordoned:
            return NodeCondition.CORDONED
        if self.not_ready_reason or now < self.quarantined_until:
            return NodeCondition.QUARANTINED
        return NodeCondition.READY

    def condition_reason(self, now: float) -> str:
        if self.session is None:
            return f"its agent is not connected since {max(0, int(now - self.last_seen))} s"
        if self.draining or self.cordoned:
            return self.reason
        if self.not_ready_reason:
            return self.not_ready_reason
        if now < self.quarantined_until:
            return f"{self.failures_in_a_row} starts failed one after another; the last: {self.last_failure}"
        return ""

    def offered(self) -> NodeCapacity:
        """What can be given out: a GPU whose memory is still held, or that others use, is not there for now."""
        types = dict(self.capacity.accelerators)
        for gpu in self.gpus:
            if gpu.state in {resources_pb2.GPU_STATE_RELEASING, resources_pb2.GPU_STATE_FOREIGN_USE}:
                types[gpu.type] = max(0, types.get(gpu.type, 0) - 1)
        return NodeCapacity(self.capacity.cpus, self.capacity.memory_bytes, types)

    def start_failed(self, now: float, why: str) -> None:
        """Counts a failure of the machine's own; sets it aside after several in a row."""
        self.failures_in_a_row += 1
        self.last_failure = why
        beyond = self.failures_in_a_row - FAILURES_TO_QUARANTINE
        if beyond >= 0:
            pause = min(FIRST_QUARANTINE_SECONDS * 2.0 ** min(beyond, 16), LONGEST_QUARANTINE_SECONDS)
            self.quarantined_until = now + pause

    def start_worked(self) -> None:
        self.failures_in_a_row = 0
        self.quarantined_until = 0.0


def node_messages(node: NodeState, used: NodeCapacity, attempt_count: int, now: float) -> list[node_service_pb2.Node]:
    """A machine as its Nodes: one with the kind of GPU that it has most of and all CPUs and memory, and one
    "<machine>/<type>" for each other kind, with those GPUs only."""
    kinds = sorted(node.capacity.accelerators.items(), key=lambda item: (-item[1], item[0]))
    main_type, main_count = kinds[0] if kinds else ("", 0)
    condition = node_service_pb2.NODE_CONDITION_LOST if node.lost else _PB_CONDITION[node.condition(now)]

    def message(
        name: str, cpus: int, memory: int, kind: str, count: int, *, with_machine: bool
    ) -> node_service_pb2.Node:
        made = node_service_pb2.Node(
            name=name,
            total_resources=resources_pb2.ComputeResources(
                cpus=cpus, memory_bytes=memory, accelerator=kind, accelerator_count=count
            ),
            status=node_service_pb2.NodeStatus(
                allocated_resources=resources_pb2.ComputeResources(
                    cpus=used.cpus if with_machine else 0,
                    memory_bytes=used.memory_bytes if with_machine else 0,
                    accelerator=kind,
                    accelerator_count=used.accelerators.get(kind, 0) if kind else 0,
                ),
                condition=condition,
                reason=node.condition_reason(now),
                attempt_count=attempt_count if with_machine else 0,
            ),
            labels=node.labels,
            agent_version=node.agent_version,
            gpus=node.gpus if with_machine else [],
        )
        made.status.last_seen_at.FromNanoseconds(int(node.last_seen * 1e9))
        if node.draining and node.drain_deadline:
            made.status.drain_deadline.FromNanoseconds(int(node.drain_deadline * 1e9))
        return made

    machine = message(
        node.name, node.capacity.cpus, node.capacity.memory_bytes, main_type, main_count, with_machine=True
    )
    others = [message(f"{node.name}/{kind}", 0, 0, kind, count, with_machine=False) for kind, count in kinds[1:]]
    return [machine, *others]
