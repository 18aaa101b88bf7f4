"""The policies compared: ours through the very code that the scheduler runs, and others as the literature has them."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.packing.trace import Task
from outerproduct_scheduler.placement import ComputeSpec, NodeCapacity, NodeCondition, Placement, WaitingCall

Floats = npt.NDArray[np.float64]
Score = Callable[["Arrays", Floats], Floats]


class Policy(Protocol):
    """Takes Calls one by one and places each or refuses it for good."""

    def offer(self, spec: ComputeSpec) -> bool:
        """Whether the Call was placed."""


class Ours:
    """`Placement`, a Call withdrawn when it does not start at once."""

    def __init__(self, nodes: Mapping[str, NodeCapacity]) -> None:
        self._placement = Placement()
        self._number = 0
        for name, capacity in nodes.items():
            self._placement.set_node(name, capacity, NodeCondition.READY, {})
        self._placement.place(0.0)

    def offer(self, spec: ComputeSpec) -> bool:
        """Whether the Call was placed."""
        self._number += 1
        call_id = str(self._number)
        self._placement.submit(WaitingCall(call_id, spec, "owner"))
        return bool(self._placement.place(0.0)) or not self._placement.withdraw(call_id)


class Arrays:
    """The cluster as arrays (rows: CPUs, bytes, GPUs; columns: nodes), and a score of which the smallest wins, ties
    by the order of the nodes."""

    def __init__(self, nodes: Mapping[str, NodeCapacity], tasks: list[Task], score: Score) -> None:
        self.total: Floats = np.array(
            [[c.cpus, c.memory_bytes, sum(c.accelerators.values())] for c in nodes.values()], dtype=float
        ).T
        self.free = self.total.copy()
        self.scale = self.total.max(axis=1)
        shapes = Counter(_vector(task.spec) for task in tasks)
        self.usual: Floats = np.array(list(shapes), dtype=float)
        self.weights: Floats = np.array(list(shapes.values()), dtype=float) / len(tasks)
        self._score = score

    def offer(self, spec: ComputeSpec) -> bool:
        """Whether the Call was placed."""
        wanted: Floats = np.array(_vector(spec), dtype=float)
        fits = (self.free >= wanted[:, None]).all(axis=0)
        if not fits.any():
            return False
        chosen = int(np.argmin(np.where(fits, self._score(self, wanted), np.inf)))
        self.free[:, chosen] -= wanted
        return True

    def fragmentation(self, free: Floats) -> Floats:
        """Per node, the free GPUs that the expected task of the workload could not use."""
        fits = (free[None, :, :] >= self.usual[:, :, None]).all(axis=1)
        fits &= self.usual[:, 2:3] > 0
        unusable: Floats = free[2] * (1 - self.weights @ fits)
        return unusable


def _vector(spec: ComputeSpec) -> tuple[int, int, int]:
    return spec.cpus, spec.memory_bytes, spec.accelerator_count


def first_fit(cluster: Arrays, _wanted: Floats) -> Floats:
    """The first node that fits."""
    return np.zeros(cluster.free.shape[1])


def best_fit(cluster: Arrays, wanted: Floats) -> Floats:
    """The least left over, each resource as a fraction of the largest node."""
    left: Floats = ((cluster.free - wanted[:, None]) / cluster.scale[:, None]).sum(axis=0)
    return left


def worst_fit(cluster: Arrays, wanted: Floats) -> Floats:
    """The most left over: spreads."""
    return -best_fit(cluster, wanted)


def dot_product(cluster: Arrays, wanted: Floats) -> Floats:
    """The smallest product of what is free and what is wanted."""
    product: Floats = (cluster.free / cluster.scale[:, None] * (wanted / cluster.scale)[:, None]).sum(axis=0)
    return product


def fragmentation_gradient(cluster: Arrays, wanted: Floats) -> Floats:
    """The smallest growth of fragmentation ("Beware of Fragmentation", for whole GPUs)."""
    return cluster.fragmentation(cluster.free - wanted[:, None]) - cluster.fragmentation(cluster.free)


OTHERS: Mapping[str, Score] = {
    "worst fit": worst_fit,
    "dot product": dot_product,
    "best fit": best_fit,
    "first fit": first_fit,
    "fragmentation gradient": fragmentation_gradient,
}
OURS = "outerproduct"


def make(name: str, nodes: Mapping[str, NodeCapacity], tasks: list[Task]) -> Policy:
    """The policy of that name on an empty cluster."""
    return Ours(nodes) if name == OURS else Arrays(nodes, tasks, OTHERS[name])
