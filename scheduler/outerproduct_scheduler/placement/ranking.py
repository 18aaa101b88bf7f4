"""How good a feasible node is for a Call: the tightest fit that strands nothing. Smaller is better.

A GPU is stranded when it is free but the CPUs or memory left beside it could not serve a usual Call. What is usual
comes from recent demand, which this module keeps as well. `docs/placement.md` compares this rank with others.
"""

from collections import deque
from collections.abc import Mapping

from outerproduct_scheduler.accelerators import matching
from outerproduct_scheduler.placement.types import ComputeSpec

Rank = tuple[float, float, float]

# How much worse a stranded GPU is than one that is merely left over.
STRANDED_WEIGHT = 10
# How much worse CPUs that no free GPU beside them will need are than a GPU left over. They are better kept for Calls
# that ask for many CPUs per GPU. Larger weights would beat the tight fit of GPUs.
SURPLUS_WEIGHT = 0.3
# A window long enough for a steady percentile and short enough to follow a change of workload within a day.
HISTORY_CALLS = 500
# A low percentile of CPUs and memory per GPU: a GPU counts as usable if a modest Call could still use it.
USUAL_PERCENTILE = 0.25
# What a Call with GPUs asks for in the middle of the range; CPUs beyond that are surplus.
MEDIAN = 0.5
# Before there is a history: the CPUs per GPU of common cloud machines.
DEFAULT_CPUS_PER_GPU = 8.0
# Recomputing costs a sort of the window, and a change makes every index stale.
REFRESH_EVERY_CALLS = 32
# Smaller changes of what is usual are noise, and following them would make every index stale again and again.
NOTICEABLE = 0.15


class Demand:
    """What recent GPU Calls ask for: CPUs and bytes per GPU, and how scarce each named type is.

    `epoch` changes whenever a rank computed earlier may no longer hold.
    """

    def __init__(self) -> None:
        self.cpus_per_gpu = DEFAULT_CPUS_PER_GPU
        self.bytes_per_gpu = 0.0
        self.median_cpus_per_gpu = DEFAULT_CPUS_PER_GPU
        self.epoch = 0
        self._recent: deque[ComputeSpec] = deque(maxlen=HISTORY_CALLS)
        self._unseen = 0
        self._capacity: Mapping[str, int] = {}
        self._scarcity: dict[str, float] = {}

    def set_capacity(self, accelerators: Mapping[str, int]) -> None:
        """Tell how many GPUs of each type all nodes have together."""
        self._capacity = dict(accelerators)
        self._refresh()

    def observe(self, spec: ComputeSpec) -> None:
        """Count a Call that was submitted."""
        if not spec.accelerator_count:
            return
        self._recent.append(spec)
        self._unseen += 1
        if self._unseen >= min(REFRESH_EVERY_CALLS, 1 + len(self._recent) // 4):
            self._refresh()

    def scarcity(self, accelerator: str) -> float:
        """GPUs of this type that recent Calls named, over those there are."""
        return self._scarcity.get(accelerator, 0.0)

    def stranded(self, cpus: int, memory_bytes: int, gpus: int) -> float:
        """Of `gpus` free GPUs, how many the CPUs and bytes free beside them could not serve.

        A fraction, not rounded to whole GPUs: what is usual is an estimate, and rounding would turn a small error
        of it into a whole GPU.
        """
        usable = cpus / self.cpus_per_gpu if self.cpus_per_gpu else float(gpus)
        if self.bytes_per_gpu:
            usable = min(usable, memory_bytes / self.bytes_per_gpu)
        return max(0.0, gpus - usable)

    def surplus(self, cpus: int, gpus: int) -> float:
        """CPUs beyond what `gpus` free GPUs need, counted in GPUs that they could serve."""
        if not self.median_cpus_per_gpu:
            return 0.0
        return max(0.0, cpus / self.median_cpus_per_gpu - gpus)

    def _refresh(self) -> None:
        self._unseen = 0
        scarcity = self._scarcity_by_type()
        if self._recent:
            cpus = sorted((s.cpus / s.accelerator_count, s.accelerator_count) for s in self._recent)
            memory = sorted((s.memory_bytes / s.accelerator_count, s.accelerator_count) for s in self._recent)
            usual = (
                _percentile(cpus, USUAL_PERCENTILE),
                _percentile(cpus, MEDIAN),
                _percentile(memory, USUAL_PERCENTILE),
            )
        else:
            usual = (self.cpus_per_gpu, self.median_cpus_per_gpu, self.bytes_per_gpu)
        before = (self.cpus_per_gpu, self.median_cpus_per_gpu, self.bytes_per_gpu)
        moved = any(abs(new - old) > NOTICEABLE * old for new, old in zip(usual, before, strict=True))
        known = self._scarcity
        if (
            moved
            or scarcity.keys() != known.keys()
            or any(abs(scarcity[name] - known[name]) > NOTICEABLE * known[name] for name in scarcity)
        ):
            self.cpus_per_gpu, self.median_cpus_per_gpu, self.bytes_per_gpu = usual
            self._scarcity = scarcity
            self.epoch += 1

    def _scarcity_by_type(self) -> dict[str, float]:
        named: dict[str, int] = {}
        for spec in self._recent:
            if spec.accelerator:
                named[spec.accelerator] = named.get(spec.accelerator, 0) + spec.accelerator_count
        demand: dict[str, float] = {}
        for name, count in named.items():
            options = matching(name, self._capacity)
            for option in options:
                demand[option] = demand.get(option, 0.0) + count / len(options)
        return {name: count / self._capacity[name] for name, count in demand.items() if self._capacity[name]}


def rank_gpu_call(
    demand: Demand, spec: ComputeSpec, accelerator: str, free: tuple[int, int, Mapping[str, int]]
) -> Rank:
    """Rank of a node for a Call with GPUs: the scarce types last, then the tightest fit, then the fewest CPUs left.

    `free` is the node's free CPUs, bytes and GPUs by type before the Call.
    """
    cpus, memory_bytes, accelerators = free
    cpus -= spec.cpus
    memory_bytes -= spec.memory_bytes
    left = accelerators[accelerator] - spec.accelerator_count
    all_left = sum(accelerators.values()) - spec.accelerator_count
    stranded = demand.stranded(cpus, memory_bytes, all_left)
    looseness = STRANDED_WEIGHT * stranded + left + SURPLUS_WEIGHT * demand.surplus(cpus, all_left)
    return (demand.scarcity(accelerator), looseness, cpus)


def rank_cpu_call(
    demand: Demand, spec: ComputeSpec, free: tuple[int, int, Mapping[str, int]], *, has_gpus: bool
) -> Rank:
    """Rank of a node for a Call without GPUs: nodes without GPUs first, then what strands least, then the tightest."""
    cpus, memory_bytes, accelerators = free
    left = cpus - spec.cpus
    if not has_gpus:
        return (0.0, 0.0, left)
    gpus = max(0, sum(accelerators.values()))
    before = demand.stranded(cpus, memory_bytes, gpus)
    after = demand.stranded(left, memory_bytes - spec.memory_bytes, gpus)
    return (1.0, after - before, left)


def _percentile(weighted: list[tuple[float, int]], fraction: float) -> float:
    """The smallest of sorted (value, weight) pairs at which the fraction of the weight is reached."""
    remaining = fraction * sum(weight for _, weight in weighted)
    for value, weight in weighted:
        remaining -= weight
        if remaining <= 0:
            return value
    return weighted[-1][0]
