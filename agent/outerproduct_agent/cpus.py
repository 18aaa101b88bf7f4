"""Which logical CPUs an Attempt gets, and which the system keeps.

Pure policy: topology and free CPUs in, CPU set out. It keeps no account of who has what: the ledger does.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.topology import CoreKind, Topology

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

# Up to here all choices of NUMA nodes are compared: every request on machines of up to 8 nodes. Beyond (half
# of a 16-node machine, say) the nodes with most free CPUs are taken.
_MAX_NODE_CHOICES = 100

# A machine of this size is a laptop or a small VM, where a reserve would take a quarter or more of it.
_NO_RESERVE_UP_TO_CPUS = 4


class NotEnoughCpusError(ValueError):
    """More CPUs were asked for than are free."""


def allocate(topology: Topology, free: CpuSet, count: int, preferred_numa: Collection[int] = ()) -> CpuSet:
    """Choose `count` of the free CPUs for one Attempt.

    What is wanted, most important first (the order follows the kubelet's static policy with full cores and
    NUMA alignment, `pkg/kubelet/cm/cpumanager/cpu_assignment.go`):

    - performance cores rather than efficiency ones, and never both where one kind has enough
    - as few NUMA nodes as possible
    - of these, the preferred ones
    - as few cores as possible shared with somebody else: whole cores first, all hyper-threads to one Attempt
    - of cores that must be shared, those that already are
    - what stays free in as large pieces as possible: the fullest NUMA nodes first, in the fewest packages
    - the lowest ids, so that the same question has the same answer

    Args:
        topology: the machine.
        free: CPUs that nobody has; those that are not usable (offline, isolated, not allowed) are ignored.
        count: logical CPUs, at least 1.
        preferred_numa: NUMA nodes to be close to, those of the Attempt's GPUs.

    Raises:
        NotEnoughCpusError: fewer than `count` usable CPUs are free.
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"{count} CPUs asked for: ask for at least 1")
    candidates = free & topology.usable
    if len(candidates) < count:
        raise NotEnoughCpusError(f"{count} CPUs asked for, {len(candidates)} free")

    # 1. One kind of core, if one has enough.
    pool = _one_kind(topology, candidates, count)

    # 2. The choices of as few NUMA nodes as possible, 3. filled core by core, 4. of which the best.
    plans = (_fill(topology, pool, nodes, count, preferred_numa) for nodes in _node_choices(topology, pool, count))
    return min(plans, key=lambda plan: plan.rank).cpus


def reserve(topology: Topology, count: int) -> CpuSet:
    """CPUs that the system and the agent keep, from CPU 0's core on.

    CPU 0 is first because the kernel handles most unmovable interrupts there. Whole cores are kept, so
    `count` is rounded up to them, unless that would leave nothing to offer.

    Args:
        topology: the machine.
        count: logical CPUs, 0 for no reserve.

    Raises:
        ValueError: `count` is negative, or leaves no CPU to offer.
    """
    if count < 0 or (count and count >= len(topology.usable)):
        raise ValueError(
            f"a reserve of {count} CPUs leaves nothing of the {len(topology.usable)} usable CPUs: "
            "set a reserve between 0 and one less than that"
        )
    kept = CpuSet()
    for threads in topology.cores.values():
        if len(kept) >= count:
            break
        kept |= threads
    if kept == topology.usable:
        return CpuSet.of(list(topology.usable)[:count])
    return kept


def default_reserve_count(topology: Topology) -> int:
    """CPUs to reserve where the operator says nothing: one (so one core), and none on small machines."""
    return 0 if len(topology.usable) <= _NO_RESERVE_UP_TO_CPUS else 1


@dataclass(frozen=True, slots=True)
class _Plan:
    cpus: CpuSet
    rank: tuple[int | tuple[int, ...], ...]


def _one_kind(topology: Topology, candidates: CpuSet, count: int) -> CpuSet:
    """The candidates of the best kind that has enough; all of them where none has."""
    for kind in (CoreKind.PERFORMANCE, CoreKind.EFFICIENCY):
        pool = CpuSet.of(cpu for cpu in candidates if topology.by_id[cpu].kind is kind)
        if len(pool) >= count:
            return pool
    return candidates


def _node_choices(topology: Topology, pool: CpuSet, count: int) -> Iterator[tuple[int, ...]]:
    """All choices of the smallest number of NUMA nodes that have `count` CPUs of the pool together."""
    free_of = {node: len(_on_nodes(topology, pool, (node,))) for node in topology.nodes_of(pool)}
    most_free_first = sorted(free_of, key=lambda node: (-free_of[node], node))
    sums = itertools.accumulate(free_of[node] for node in most_free_first)
    size = next(number for number, total in enumerate(sums, start=1) if total >= count)
    if math.comb(len(free_of), size) > _MAX_NODE_CHOICES:
        yield tuple(sorted(most_free_first[:size]))
        return
    for nodes in itertools.combinations(sorted(free_of), size):
        if sum(free_of[node] for node in nodes) >= count:
            yield nodes


def _fill(
    topology: Topology, pool: CpuSet, nodes: tuple[int, ...], count: int, preferred_numa: Collection[int]
) -> _Plan:
    """Take `count` CPUs of the pool on these nodes, and rank the result (lower is better)."""
    available = _on_nodes(topology, pool, nodes)
    free_of = {node: len(_on_nodes(topology, pool, (node,))) for node in nodes}

    def order(core: CpuSet) -> tuple[bool, bool, int, int]:
        cpu = topology.by_id[next(iter(core))]
        return (
            cpu.kind is CoreKind.EFFICIENCY,
            cpu.numa_node not in preferred_numa,
            free_of[cpu.numa_node],
            cpu.id,
        )

    pieces = sorted(_pieces_of_cores(topology, available), key=order)
    whole = [piece for piece in pieces if piece == topology.siblings(next(iter(piece)))]
    shared = [piece for piece in pieces if piece != topology.siblings(next(iter(piece)))]
    taken = CpuSet()

    # 1. Whole cores, the widest first: where widths divide each other nothing else leaves fewer CPUs to find.
    for core in sorted(whole, key=len, reverse=True):
        if len(taken) + len(core) <= count:
            taken |= core
    # 2. The rest from the smallest piece that has it: a core that is shared already, else a new one.
    # 3. Where no piece has it, all of the largest, and again.
    while (missing := count - len(taken)) > 0:
        shared_left = [piece for piece in shared if piece.isdisjoint(taken)]
        whole_left = [core for core in whole if core.isdisjoint(taken)]
        enough = [piece for piece in shared_left if len(piece) >= missing] or [
            core for core in whole_left if len(core) >= missing
        ]
        piece = min(enough, key=len) if enough else max(shared_left + whole_left, key=len)
        taken |= CpuSet.of(list(piece)[:missing])

    touched = _pieces_of_cores(topology, taken)
    rank = (
        -sum(topology.by_id[cpu].numa_node in preferred_numa for cpu in taken),
        sum(piece != topology.siblings(next(iter(piece))) for piece in touched),
        sum(not core <= taken for core in whole if not core.isdisjoint(taken)),
        len({topology.by_id[cpu].package for cpu in taken}),
        len(available),
        tuple(taken),
    )
    return _Plan(taken, rank)


def _on_nodes(topology: Topology, cpus: CpuSet, nodes: Sequence[int]) -> CpuSet:
    return CpuSet.of(cpu for cpu in cpus if topology.by_id[cpu].numa_node in nodes)


def _pieces_of_cores(topology: Topology, cpus: CpuSet) -> list[CpuSet]:
    """These CPUs, grouped by physical core."""
    pieces: dict[int, set[int]] = {}
    for cpu in cpus:
        pieces.setdefault(topology.by_id[cpu].core, set()).add(cpu)
    return [CpuSet.of(ids) for ids in pieces.values()]
