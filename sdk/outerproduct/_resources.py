"""What a Call may ask for, and what a node has."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3
MIB = 1024**2

DEFAULT_MEMORY_BYTES_PER_CPU = 2 * GIB
MINIMUM_MEMORY_BYTES = 64 * MIB
"""An interpreter with the runner and its libraries needs about half of this before the function begins."""


@dataclass(frozen=True)
class ComputeResources:
    """What a node has, or has given out."""

    cpus: int
    """Logical CPUs."""
    memory_bytes: int
    """Bytes of RAM."""
    accelerator: str = ""
    """GPU type name as `gpu_type` takes it; empty without GPUs."""
    accelerator_count: int = 0
    """GPUs of that type."""


@dataclass(frozen=True)
class ComputeSpec:
    """What one Call asks for."""

    cpus: int
    memory_bytes: int
    accelerator: str = ""
    accelerator_count: int = 0


def compute_spec(cpu: object, memory_bytes: object, gpu: object, gpu_type: object) -> ComputeSpec:
    """The hardware parameters of `client.run`, checked and with their defaults.

    Raises TypeError or ValueError that name the parameter, the value and what would be right.
    """
    cpus = _count("cpu", cpu, minimum=1, example="cpu=4 for four logical CPUs")
    if memory_bytes is None:
        memory = cpus * DEFAULT_MEMORY_BYTES_PER_CPU
    else:
        memory = _count("memory_bytes", memory_bytes, minimum=1, example="memory_bytes=8 * 1024**3 for 8 GiB")
        if memory < MINIMUM_MEMORY_BYTES:
            raise ValueError(
                f"memory_bytes={memory} is below the floor of {MINIMUM_MEMORY_BYTES} bytes (64 MiB), which Python "
                "itself needs. It counts bytes: 8 GiB is 8 * 1024**3."
            )
    if gpu_type is not None and not isinstance(gpu_type, str):
        raise TypeError(f'gpu_type={gpu_type!r} must be the name of a GPU type, such as "L4" or "A100-80GB"')
    if gpu_type is not None and not gpu_type.strip():
        raise ValueError(
            f'gpu_type={gpu_type!r} is empty: name a GPU type, such as "L4", or leave it out for GPUs of any one type'
        )
    gpus = None if gpu is None else _count("gpu", gpu, minimum=0, example="gpu=1 for one GPU")
    if gpu_type is not None and gpus == 0:
        raise ValueError(f"gpu=0 contradicts gpu_type={gpu_type!r}: leave gpu_type out, or ask for one GPU or more")
    count = (1 if gpu_type is not None else 0) if gpus is None else gpus
    return ComputeSpec(cpus, memory, (gpu_type or "").strip(), count)


def _count(name: str, value: object, *, minimum: int, example: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number (int), not {type(value).__name__}: {example}")
    if value < minimum:
        raise ValueError(f"{name}={value} must be {minimum} or more: {example}")
    return value


def gib(count: int) -> str:
    """Bytes for people."""
    if count >= GIB:
        return f"{count / GIB:.4g} GiB"
    return f"{count / MIB:.4g} MiB"
