"""The placement core: which node each waiting Call goes to, in which order, and why the others wait.

Pure: no I/O, no clock (time is an argument), no gRPC, no asyncio. The live scheduler, the simulator, the benchmarks
and the property tests all run this same code.

    queues        who is next: a queue per class and priority, owners in fair order, first come first served within
      |
    nodes         feasible: what is free where, and the best node per shape of Call, kept up to date incrementally
      |
    ranking       rank: the tightest fit that strands nothing
      |
    reservations  what a blocked Call holds, and who may pass it
      |
    core          assign: `Placement` draws these together and keeps the accounts

`explain` turns the same facts into the sentences that users read.
"""

from outerproduct_scheduler.placement.core import Placement
from outerproduct_scheduler.placement.types import (
    Assignment,
    ComputeSpec,
    NodeCapacity,
    NodeCondition,
    Unsupported,
    WaitingCall,
)

__all__ = [
    "Assignment",
    "ComputeSpec",
    "NodeCapacity",
    "NodeCondition",
    "Placement",
    "Unsupported",
    "WaitingCall",
]
