"""Builds the stand-in for libnvidia-ml.so.1 and says what it shows.

`pynvml` finds libraries through the dynamic linker, so the code under test runs in a subprocess whose environment
comes from `FakeNvml.environment`. The scenario can be replaced while that process runs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from outerproduct_agent.gpus import GpuInventory

SOURCE = Path(__file__).with_name("fake_nvml.c")

# Error codes of nvml.h that scenarios use.
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
VERSION_MISMATCH = 18
UNKNOWN = 999


@dataclass(frozen=True)
class FakeSlice:
    """A MIG device; with an empty profile its name does not tell it, as with older drivers."""

    uuid: str
    memory_mib: int
    gpu_slices: int
    profile: str = ""
    used_mib: int = 0
    error: int = 0


@dataclass(frozen=True)
class FakeGpu:
    """A GPU. `error` is what every call about it returns, `late_error` what all but that for its UUID return."""

    uuid: str
    name: str = "NVIDIA L4"
    memory_mib: int = 23034
    used_mib: int = 0
    bus_id: str = ""
    error: int = 0
    late_error: int = 0
    uncorrectable_ecc_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    old_memory_call: bool = False
    slices: tuple[FakeSlice, ...] | None = None
    # (pid, MiB)
    processes: tuple[tuple[int, int], ...] = ()
    # PCI bus id of the other end of each NVLink
    nvlinks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """What the library shows.

    Attributes:
        gpus: in NVML's order.
        init_error: what opening NVML, and every call after it, returns; 0 for success.
        paths: PCIe path (NVML_TOPOLOGY_*) between two GPUs by index; NVML_TOPOLOGY_INTERNAL where not given.
        xids: (index of the GPU, XID) of every event so far; each is delivered once per process.
    """

    gpus: tuple[FakeGpu, ...] = ()
    init_error: int = 0
    driver_version: str = "550.54.15"
    paths: dict[tuple[int, int], int] = field(default_factory=dict)
    xids: tuple[tuple[int, int], ...] = ()

    def lines(self) -> list[str]:
        """The scenario in the format of fake_nvml.c, one fact per line."""
        lines = [f"init {self.init_error}", f"driver {self.driver_version}"]
        for index, gpu in enumerate(self.gpus):
            lines.append(_gpu_line(index, gpu))
            lines += [f"process {index} -1 {pid} {memory_mib}" for pid, memory_mib in gpu.processes]
            lines += [f"nvlink {index} {link} {remote}" for link, remote in enumerate(gpu.nvlinks)]
            for slot, one in enumerate(gpu.slices or ()):
                name = f"{gpu.name} MIG {one.profile}" if one.profile else gpu.name
                lines.append(
                    f"slice {index} {slot} uuid={one.uuid} memory={one.memory_mib} used={one.used_mib} "
                    f"slices={one.gpu_slices} error={one.error} name={name}"
                )
        lines += [f"path {first} {second} {level}" for (first, second), level in self.paths.items()]
        lines += [f"xid {number} {gpu} {xid}" for number, (gpu, xid) in enumerate(self.xids, start=1)]
        return lines


def bus_id(index: int) -> str:
    """The PCI bus id of a fake GPU that is not given one."""
    return f"00000000:{index + 0x10:02X}:00.0"


def _gpu_line(index: int, gpu: FakeGpu) -> str:
    return (
        f"gpu {index} uuid={gpu.uuid} bus={gpu.bus_id or bus_id(index)} "
        f"memory={gpu.memory_mib} used={gpu.used_mib} "
        f"error={gpu.error} late={gpu.late_error} ecc={gpu.uncorrectable_ecc_errors} "
        f"pending={int(gpu.remap_pending)} failed={int(gpu.remap_failed)} "
        f"mig={-1 if gpu.slices is None else 1} v1={int(gpu.old_memory_call)} name={gpu.name}"
    )


class FakeNvml:
    """A folder with the built library and its scenario."""

    def __init__(self, folder: Path) -> None:
        """Build the library into this folder with gcc.

        Raises:
            subprocess.CalledProcessError: it does not compile.
        """
        self._folder = folder
        self._scenario = folder / "scenario"
        command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
        self.show(Scenario())

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that loads this library."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self._folder),
            "FAKE_NVML_SCENARIO": str(self._scenario),
        }

    def show(self, scenario: Scenario) -> None:
        """Show this from the next call on; a call sees either the old scenario or the new one."""
        new = self._scenario.with_suffix(".new")
        new.write_text("\n".join(scenario.lines()) + "\n", encoding="utf-8")
        new.replace(self._scenario)


class Probe:
    """A process that looks at the fake library through the agent's code, see probe.py."""

    def __init__(self, fake: FakeNvml, sys_root: Path) -> None:
        """Start it; NVML is loaded at the first question."""
        self._process = subprocess.Popen(
            [sys.executable, str(SOURCE.with_name("probe.py")), str(sys_root)],
            env=fake.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read(self, offer: str = "all") -> GpuInventory:
        """One reading of the GPUs."""
        return cast("GpuInventory", self._ask(f"read {offer}"))

    def poll(self, times: int = 1) -> GpuInventory:
        """What the monitor says after so many more readings."""
        for _ in range(times - 1):
            self._ask("poll")
        return cast("GpuInventory", self._ask("poll"))

    def clear(self, uuid: str) -> bool:
        """Tell the monitor to clear a GPU."""
        return cast("bool", self._ask(f"clear {uuid}"))

    def close(self) -> None:
        """End the process.

        Raises:
            AssertionError: it did not end cleanly.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=30) == 0

    def _ask(self, command: str) -> object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)
