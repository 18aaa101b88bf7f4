"""Reads nodes and tasks in the format of Alibaba's cluster-trace-gpu-v2023, and makes synthetic ones like them.

CPUs are counted in the trace's own unit, thousandths, so that figures compare with published ones: rounding each
task up to whole CPUs would make CPUs scarce that were not. A task that shares a GPU is dropped or counted as one whole
GPU, as the caller says, since our Calls take whole ones. The lists name no models ("Beware of Fragmentation", USENIX
ATC 2023, describes them).
"""

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outerproduct_scheduler.placement import ComputeSpec, NodeCapacity

MIB = 1 << 20
GIB = 1 << 30
WHOLE_GPU_MILLI = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a trace; times in seconds, the end infinite where the trace has none."""

    spec: ComputeSpec
    created_at: float = 0.0
    deleted_at: float = math.inf


def read_nodes(path: Path) -> dict[str, NodeCapacity]:
    """Nodes by name, in the order of the file."""
    with path.open(newline="") as file:
        return {
            row["sn"]: NodeCapacity(
                int(row["cpu_milli"]),
                int(row["memory_mib"]) * MIB,
                {row["model"]: int(row["gpu"])} if int(row["gpu"]) else {},
            )
            for row in csv.DictReader(file)
        }


def read_tasks(path: Path, *, shared: str) -> list[Task]:
    """Tasks in the order of the file; `shared` is `drop` or `round-up`."""
    with path.open(newline="") as file:
        return [
            Task(
                ComputeSpec(int(row["cpu_milli"]), int(row["memory_mib"]) * MIB, "", int(row["num_gpu"])),
                float(row.get("creation_time") or 0),
                float(row.get("deletion_time") or math.inf),
            )
            for row in csv.DictReader(file)
            if shared == "round-up" or not 0 < int(row["num_gpu"]) * int(row["gpu_milli"]) < WHOLE_GPU_MILLI
        ]


def arrivals(tasks: list[Task], seed: int) -> Iterator[ComputeSpec]:
    """The tasks in an order given by the seed, and when all have come, draws from them without end."""
    rng = random.Random(seed)
    shuffled = list(tasks)
    rng.shuffle(shuffled)
    for task in shuffled:
        yield task.spec
    while True:
        yield rng.choice(tasks).spec


def synthetic_nodes(count: int, rng: random.Random) -> dict[str, NodeCapacity]:
    """Nodes as people buy them: 2, 4 or 8 GPUs with 8 to 16 CPUs and 32 to 64 GiB for each."""
    nodes = {}
    for number in range(count):
        gpus = rng.choice((2, 4, 8, 8))
        cpus, memory_gib = rng.choice(((8, 32), (12, 48), (16, 64)))
        nodes[f"node-{number:05}"] = NodeCapacity(cpus * gpus, memory_gib * gpus * GIB, {"GPU": gpus})
    return nodes


def synthetic_spec(rng: random.Random) -> ComputeSpec:
    """A Call with 1 to 8 GPUs; CPUs and memory uneven around what nodes offer."""
    gpus = rng.choices((1, 2, 4, 8), weights=(60, 20, 12, 8))[0]
    cpus = rng.choice((2, 4, 6, 8, 8, 10, 12)) * gpus
    return ComputeSpec(cpus, cpus * rng.choice((2, 4)) * GIB, "", gpus)
