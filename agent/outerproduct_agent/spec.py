"""What one Attempt asks of this machine.

The scheduler has already turned "any GPU" into one concrete type, so nothing here is a choice: the ledger
either finds exactly this or declines. Protobuf messages are turned into this type by the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComputeSpec:
    """CPUs, memory and GPUs of one Attempt.

    Attributes:
        cpus: logical CPUs, at least 1.
        memory_bytes: hard limit of the container in bytes, `/dev/shm` included; at least 1.
        accelerator: canonical GPU type such as "L4" or "A100-80GB"; empty without GPUs.
        accelerator_count: GPUs of that type.

    Raises:
        ValueError: a number is out of range, or type and count contradict each other.
    """

    cpus: int
    memory_bytes: int
    accelerator: str = ""
    accelerator_count: int = 0

    def __post_init__(self) -> None:
        if self.cpus < 1:
            raise ValueError(f"ComputeSpec.cpus is {self.cpus}: ask for at least 1 CPU")
        if self.memory_bytes < 1:
            raise ValueError(f"ComputeSpec.memory_bytes is {self.memory_bytes}: ask for at least 1 byte")
        if self.accelerator_count < 0 or bool(self.accelerator) != bool(self.accelerator_count):
            raise ValueError(
                f"ComputeSpec asks for {self.accelerator_count} GPUs of type {self.accelerator!r}: "
                "give a concrete type and a count, or neither"
            )
