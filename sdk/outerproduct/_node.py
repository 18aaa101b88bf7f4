"""Node: a machine that runs Calls, as users see it."""

from __future__ import annotations

from dataclasses import dataclass

from outerproduct._resources import ComputeResources, gib
from outerproduct._wire import Message, enum_of


@dataclass(frozen=True)
class NodeStatus:
    """What changes on a node."""

    allocated_resources: ComputeResources
    """Given out now."""
    condition: str = "ready"
    """ "ready", "cordoned", "draining", "unreachable", "lost" or "quarantined"."""
    reason: str = ""
    """Why it is not ready."""


@dataclass(frozen=True)
class Node:
    """A machine, or one kind of its GPUs ("<machine>/<type>")."""

    name: str
    total_resources: ComputeResources | None
    status: NodeStatus

    def __repr__(self) -> str:
        total, used = self.total_resources, self.status.allocated_resources
        if total is None:
            return f"<Node {self.name}>"
        gpus = (
            f", {used.accelerator_count} of {total.accelerator_count} x {total.accelerator}"
            if total.accelerator_count
            else ""
        )
        return (
            f"<Node {self.name}: in use {used.cpus} of {total.cpus} CPUs, {gib(used.memory_bytes)} of "
            f"{gib(total.memory_bytes)}{gpus}>"
        )


def node_of(message: Message) -> Node:
    status = message.get("status") or {}
    total = message.get("total_resources")
    return Node(
        name=message["name"],
        total_resources=_resources_of(total) if total else None,
        status=NodeStatus(
            allocated_resources=_resources_of(status.get("allocated_resources") or {}),
            condition=enum_of(status.get("condition"), "NODE_CONDITION_").lower(),
            reason=status.get("reason", ""),
        ),
    )


def _resources_of(message: Message) -> ComputeResources:
    return ComputeResources(
        cpus=int(message.get("cpus", 0)),
        memory_bytes=int(message.get("memory_bytes", 0)),
        accelerator=message.get("accelerator", ""),
        accelerator_count=int(message.get("accelerator_count", 0)),
    )
