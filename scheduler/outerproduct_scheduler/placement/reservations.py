"""What a blocked Call holds on a node, and what may still start there without delaying it (EASY backfill).

A reservation counts on the Calls that run on its node ending by their timeouts. Until then another Call may start
there if it ends before that, or if it uses only what stays free beside the holder. Lifka, "The ANL/IBM SP scheduling
system", JSSPP 1995. Which Calls reserve, and who takes precedence over a holder, is decided in `core`.
"""

import math
import sys
from dataclasses import dataclass, field

from outerproduct_scheduler.placement.nodes import Node, Shape, Tenant
from outerproduct_scheduler.placement.queues import Waiting
from outerproduct_scheduler.placement.types import ComputeSpec


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a Call could start on a node at the latest (seconds; infinite where a Call without a timeout is in the
    way), on GPUs of which type, and what is free beside it then."""

    starts_at: float
    accelerator: str
    spare_cpus: int
    spare_memory_bytes: int
    spare_accelerators: dict[str, int]

    def leaves_room_for(self, spec: ComputeSpec, accelerator: str) -> bool:
        """Whether a Call that does not end in time fits beside the holder."""
        return (
            spec.cpus <= self.spare_cpus
            and spec.memory_bytes <= self.spare_memory_bytes
            and (not spec.accelerator_count or spec.accelerator_count <= self.spare_accelerators.get(accelerator, 0))
        )


@dataclass(slots=True)
class Reservation:
    """One blocked Call's hold on one node."""

    holder: Waiting
    node: Node
    _outlook: Outlook | None = field(default=None, init=False)
    _version: int = field(default=-1, init=False)
    _computed_at: float = field(default=math.nan, init=False)

    def outlook(self, now: float) -> Outlook | None:
        """When the holder could start; None when the node has become too small for it."""
        stale = self._outlook is None or self._outlook.starts_at <= now
        if self._version != self.node.version or (stale and self._computed_at != now):
            self._outlook = outlook(self.holder.shape, self.node, now)
            self._version = self.node.version
            self._computed_at = now
        return self._outlook

    def longest_run(self, spec: ComputeSpec, accelerator: str, now: float) -> float:
        """How long a Call of this kind, which fits now, may run here without delaying the holder, in seconds; infinite
        where it may run for ever."""
        expected = self.outlook(now)
        if expected is None or expected.leaves_room_for(spec, accelerator):
            return math.inf
        # The holder waits for Calls without a bound themselves: any bound will do, but there must be one.
        return min(expected.starts_at - now, sys.float_info.max)


def _ending_order(tenant: Tenant) -> tuple[float, int]:
    return tenant.ends_at, tenant.number


def outlook(shape: Shape, node: Node, now: float) -> Outlook | None:
    """Let the node's Calls end one after another until the shape fits; None if it cannot fit even then.

    Calls without a timeout end last, the oldest first, so the one that must end for the holder is one that ran
    already when it reserved. A Call past its timeout is taken to end now.
    """
    spec = shape.spec
    cpus, memory_bytes, accelerators = node.cpus, node.memory_bytes, dict(node.accelerators)
    starts_at = now

    def fitting() -> str | None:
        if spec.cpus > cpus or spec.memory_bytes > memory_bytes:
            return None
        if not spec.accelerator_count:
            return ""
        options = [n for n, free in accelerators.items() if free >= spec.accelerator_count and shape.accepts(n)]
        return min(options, default=None)

    chosen = fitting()
    if chosen is None:
        for tenant in sorted(node.tenants.values(), key=_ending_order):
            cpus += tenant.spec.cpus
            memory_bytes += tenant.spec.memory_bytes
            if tenant.spec.accelerator_count:
                accelerators[tenant.accelerator] = (
                    accelerators.get(tenant.accelerator, 0) + tenant.spec.accelerator_count
                )
            starts_at = max(starts_at, tenant.ends_at)
            chosen = fitting()
            if chosen is not None:
                break
        else:
            return None
    if spec.accelerator_count:
        accelerators[chosen] -= spec.accelerator_count
    return Outlook(starts_at, chosen, cpus - spec.cpus, memory_bytes - spec.memory_bytes, accelerators)
