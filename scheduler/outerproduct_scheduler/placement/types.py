"""The values that go into and come out of placement. Plain data; the rules are in the modules beside this one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ComputeSpec:
    """What a Call asks for.

    `accelerator` is the name as the user gave it (see `accelerators.matches`); empty with a count takes any one type.
    Raises `ValueError` for amounts that no Call can mean.
    """

    cpus: int
    memory_bytes: int
    accelerator: str = ""
    accelerator_count: int = 0

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.memory_bytes < 0 or self.accelerator_count < 0:
            raise ValueError(f"{self} asks for a negative amount: amounts are 0 or more")
        if self.accelerator and not self.accelerator_count:
            raise ValueError(f"{self} names an accelerator and asks for none: give accelerator_count")


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Amounts on one node: its totals (the agent's reserve already taken off), or what is used or free of them.

    `accelerators` counts healthy GPUs by canonical type. What is free is negative where a node shrank below its use.
    """

    cpus: int
    memory_bytes: int
    accelerators: Mapping[str, int] = field(default_factory=dict)


class NodeCondition(StrEnum):
    """Whether new Calls may go to a node. Only READY takes any; all of them count as registered."""

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A Call that waits for a node.

    `owner` is whom fairness counts it for. A higher `priority` goes first. `submitted_at` (seconds) is only compared;
    a Call that comes back after a failed Attempt keeps its own, and so its place. `timeout_seconds` bounds the run
    time; None is taken as never ending. A node must carry all `labels`. `avoid_nodes` are taken only while no other
    ready node is large enough.
    """

    call_id: str
    spec: ComputeSpec
    owner: str
    priority: int = 0
    submitted_at: float = 0.0
    timeout_seconds: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    avoid_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Assignment:
    """A Call's node, and the concrete accelerator type its GPUs there have (empty without GPUs)."""

    call_id: str
    node: str
    accelerator: str
    spec: ComputeSpec


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why no registered node could ever hold a Call: what was asked, what there is, and the nearest miss."""

    message: str
