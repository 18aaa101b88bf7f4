"""What GPUs this machine has, read through NVML (`pynvml` of the nvidia-ml-py package).

Reading is a snapshot without memory: which GPUs are well enough to be offered over time is `gpu_health.py`,
who holds which is the ledger. An NVML error on one device never hides another, and no driver at all is a
normal machine.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from outerproduct_agent.gpu_groups import GpuLinks
from outerproduct_agent.gpu_names import canonical_type, mig_profile, mig_type

_T = TypeVar("_T")
# An opaque handle of NVML; nvidia-ml-py has no types.
_Handle = object

# Closeness of two GPUs by the path between them, on the scale of NVIDIA's go-gpuallocator: PCIe paths stay
# below one NVLink, and each further NVLink between the two counts as much again.
_PATH_SCORES = {
    pynvml.NVML_TOPOLOGY_INTERNAL: 60,
    pynvml.NVML_TOPOLOGY_SINGLE: 50,
    pynvml.NVML_TOPOLOGY_MULTIPLE: 40,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: 30,
    pynvml.NVML_TOPOLOGY_NODE: 20,
    pynvml.NVML_TOPOLOGY_SYSTEM: 10,
}
_NVLINK_SCORE = 100

_OFFER_HELP = "give `all`, `none`, or UUIDs as `nvidia-smi -L` prints them, separated by commas"


class GpuHealth(enum.Enum):
    """Whether a GPU may be given out."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU; memory is 0 where the driver does not tell."""

    pid: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG device.

    Attributes:
        uuid: its identity, "GPU-..." or "MIG-...".
        index: NVML's index of the (parent) GPU; for people only, it changes between boots.
        type: canonical type name.
        product_name: NVML's product name.
        pci_bus_id: such as "00000000:3B:00.0"; that of the parent for a MIG device.
        numa_node: NUMA node of the PCI slot, -1 when unknown.
        memory_bytes: total device memory.
        memory_used_bytes: used now, without what the driver keeps for itself where it tells.
        processes: that compute on it now.
        use_known: whether the GPU told its used memory and processes in this reading.
        health: as seen in this reading.
        reason: why it is not healthy; empty when it is.
        mig_parent: UUID of the GPU that a MIG device is part of; empty for whole GPUs.
        mig_profile: such as "3g.20gb"; empty for whole GPUs.
        excluded: why it is not offered although it may be healthy; empty when it is offered.
    """

    uuid: str
    index: int
    type: str
    product_name: str
    pci_bus_id: str = ""
    numa_node: int = -1
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()
    use_known: bool = True
    health: GpuHealth = GpuHealth.HEALTHY
    reason: str = ""
    mig_parent: str = ""
    mig_profile: str = ""
    excluded: str = ""


@dataclass(frozen=True)
class GpuInventory:
    """One reading of all GPUs.

    Attributes:
        gpus: in NVML's order, MIG devices after their parent.
        links: closeness of the healthy whole GPUs.
        driver_version: of NVIDIA's driver; empty without one.
        problem: why NVML as a whole could not be read; empty when it could, and on machines without a driver.
        unreadable: one text for each device that did not even tell its UUID.
    """

    gpus: tuple[Gpu, ...] = ()
    links: GpuLinks = field(default_factory=GpuLinks)
    driver_version: str = ""
    problem: str = ""
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """Which GPUs the operator lets the agent offer: all, or those with the listed UUIDs."""

    all_gpus: bool = True
    uuids: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> GpuOffer:
        """Parse "all", "none", or UUIDs of GPUs and MIG devices separated by commas.

        Raises:
            ValueError: an entry is not a UUID of a GPU.
        """
        if text.strip() in ("all", "none"):
            return cls(all_gpus=text.strip() == "all")
        uuids = frozenset(part.strip() for part in text.split(",") if part.strip())
        for uuid in uuids:
            if not uuid.startswith(("GPU-", "MIG-")):
                raise ValueError(f"{uuid!r} is not the UUID of a GPU: {_OFFER_HELP}")
        if not uuids:
            raise ValueError(f"no GPUs named: {_OFFER_HELP}")
        return cls(all_gpus=False, uuids=uuids)

    def exclusion(self, uuid: str, mig_parent: str = "") -> str:
        """Why this GPU is not offered; empty when it is. A MIG device is offered with its parent too."""
        if self.all_gpus or uuid in self.uuids or (mig_parent and mig_parent in self.uuids):
            return ""
        return "not among the GPUs that the operator offers"


ALL_GPUS = GpuOffer()


def read_gpus(*, offer: GpuOffer = ALL_GPUS, sys_root: Path = Path("/sys")) -> GpuInventory:
    """Read all GPUs of the machine. Blocks for up to seconds when a GPU is in trouble.

    Args:
        offer: which GPUs the operator lets the agent offer.
        sys_root: where sysfs is mounted, for the NUMA nodes.
    """
    try:
        with nvml():
            return _read(offer, sys_root)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return GpuInventory()
    except pynvml.NVMLError as error:
        return GpuInventory(problem=_describe_nvml_failure(error))


@contextlib.contextmanager
def nvml() -> Iterator[None]:
    """Hold NVML open. NVML counts its users, so that holders may overlap.

    Raises:
        pynvml.NVMLError: NVML cannot be opened.
    """
    pynvml.nvmlInit()
    try:
        yield
    finally:
        # After a driver upgrade even the shutdown fails; there is then nothing left to close.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def text_of(value: bytes | str) -> str:
    """A string of NVML: bytes from older bindings, str from newer ones, either padded with NULs."""
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text.split("\0", 1)[0].strip()


def _describe_nvml_failure(error: pynvml.NVMLError) -> str:
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return (
            "the NVIDIA driver and its library differ in version, as after an upgrade without a reboot: "
            "reboot, and hold the driver's packages (`apt-mark hold`)"
        )
    return f"NVML failed: {error}. See `dmesg` for NVRM messages"


def _read(offer: GpuOffer, sys_root: Path) -> GpuInventory:
    gpus: list[Gpu] = []
    handles: dict[str, _Handle] = {}
    unreadable: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text_of(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            unreadable.append(f"GPU {index} does not answer: {error}")
            continue
        gpu = _read_gpu(handle, uuid, index, offer, sys_root)
        slices: list[Gpu] | None = None
        try:
            slices = _read_mig_devices(handle, gpu, offer)
        except pynvml.NVMLError as error:
            gpu = _failed(gpu, error)
        if slices is not None:
            gpu = replace(gpu, excluded=gpu.excluded or "split into MIG devices")
        gpus += [gpu, *(slices or ())]
        handles[uuid] = handle
    whole = [gpu for gpu in gpus if gpu.uuid in handles]
    return GpuInventory(
        gpus=tuple(gpus),
        links=_read_links(whole, handles),
        driver_version=text_of(_ask(pynvml.nvmlSystemGetDriverVersion, default="")),
        unreadable=tuple(unreadable),
    )


def _read_gpu(handle: _Handle, uuid: str, index: int, offer: GpuOffer, sys_root: Path) -> Gpu:
    gpu = Gpu(uuid, index, type="GPU", product_name="", use_known=False, excluded=offer.exclusion(uuid))
    try:
        name = text_of(pynvml.nvmlDeviceGetName(handle))
        total, used = _memory(handle)
        bus_id = text_of(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        gpu = replace(
            gpu,
            type=canonical_type(name, total),
            product_name=name,
            pci_bus_id=bus_id,
            numa_node=_numa_node(sys_root, bus_id),
            memory_bytes=total,
            memory_used_bytes=used,
        )
        fault = _fault(handle)
        return replace(
            gpu,
            processes=_processes(handle),
            use_known=True,
            health=GpuHealth.UNHEALTHY if fault else GpuHealth.HEALTHY,
            reason=fault,
        )
    except pynvml.NVMLError as error:
        return _failed(gpu, error)


def _failed(gpu: Gpu, error: pynvml.NVMLError) -> Gpu:
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        reason = "fallen off the bus: reset the GPU or reboot"
    else:
        reason = f"NVML could not read it: {error}"
    return replace(gpu, health=GpuHealth.UNHEALTHY, reason=reason)


def _read_mig_devices(handle: _Handle, parent: Gpu, offer: GpuOffer) -> list[Gpu] | None:
    """The MIG devices of a GPU, `None` where MIG is off. Each is as healthy as its parent."""
    current, _pending = _ask(pynvml.nvmlDeviceGetMigMode, handle, default=(pynvml.NVML_DEVICE_MIG_DISABLE, 0))
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    devices = []
    for slot in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, default=0)):
        try:
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            uuid = text_of(pynvml.nvmlDeviceGetUUID(device))
            name = text_of(pynvml.nvmlDeviceGetName(device))
            total, used = _memory(device)
            profile = mig_profile(name) or _profile_from_attributes(device)
        except pynvml.NVMLError_NotFound:
            continue  # an empty slot
        except pynvml.NVMLError as error:
            # Its UUID may be unknown; the parent, which cannot be given out anyway, is not to blame.
            unread = replace(
                parent, uuid=f"MIG-unread-{slot}-of-{parent.uuid}", mig_parent=parent.uuid, use_known=False
            )
            devices.append(_failed(unread, error))
            continue
        devices.append(
            replace(
                parent,
                uuid=uuid,
                type=mig_type(parent.type, profile),
                product_name=name,
                memory_bytes=total,
                memory_used_bytes=used,
                processes=_ask(_processes, device, default=()),
                use_known=True,
                mig_parent=parent.uuid,
                mig_profile=profile,
                excluded=offer.exclusion(uuid, parent.uuid),
            )
        )
    return devices


def _profile_from_attributes(device: _Handle) -> str:
    """Older drivers leave the profile out of the name: "<GPU slices>g.<memory>gb"."""
    attributes = pynvml.nvmlDeviceGetAttributes_v2(device)
    return f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"


def _memory(handle: _Handle) -> tuple[int, int]:
    """Total and used bytes. The second version of the call leaves out what the driver reserves, which is
    hundreds of MiB on an idle GPU; drivers before 510 do not have it. GPUs without memory of their own (GB10,
    which shares the CPU's) have neither, and count as 0."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_InvalidArgument,
    ):
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, default=None)
    return (0, 0) if memory is None else (int(memory.total), int(memory.used))


def _processes(handle: _Handle) -> tuple[GpuProcess, ...]:
    found: list[Any] = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle, default=[])
    return tuple(GpuProcess(int(one.pid), int(one.usedGpuMemory or 0)) for one in found)


def _fault(handle: _Handle) -> str:
    """A fault that the GPU reports about itself; empty without one."""
    uncorrectable = _ask(
        pynvml.nvmlDeviceGetTotalEccErrors,
        handle,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
        default=0,
    )
    if uncorrectable:
        return f"{uncorrectable} uncorrectable ECC errors since the driver was loaded: reset the GPU"
    _corrected, _uncorrected, pending, failed = _ask(pynvml.nvmlDeviceGetRemappedRows, handle, default=(0, 0, 0, 0))
    if failed:
        return "a faulty row of its memory could not be remapped: replace the GPU"
    if pending:
        return "a faulty row of its memory waits to be remapped: reset the GPU"
    return ""


def _numa_node(sys_root: Path, bus_id: str) -> int:
    """NVML writes the PCI domain with eight digits, sysfs with four (Documentation/PCI/sysfs-pci.rst)."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        text = (sys_root / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text(encoding="ascii")
        return max(int(text), -1)
    except (OSError, ValueError):
        return -1


def _read_links(gpus: list[Gpu], handles: dict[str, _Handle]) -> GpuLinks:
    by_bus_id = {gpu.pci_bus_id.lower(): gpu.uuid for gpu in gpus}
    healthy = [gpu.uuid for gpu in gpus if gpu.health is GpuHealth.HEALTHY]
    to_peers: dict[frozenset[str], int] = {}
    to_switches: dict[str, int] = {}
    for uuid in healthy:
        for is_gpu, remote_bus_id in _nvlink_remotes(handles[uuid]):
            peer = by_bus_id.get(remote_bus_id)
            if peer is not None:
                pair = frozenset((uuid, peer))
                to_peers[pair] = to_peers.get(pair, 0) + 1
            elif not is_gpu:
                to_switches[uuid] = to_switches.get(uuid, 0) + 1
    scores = {}
    for first, second in itertools.combinations(healthy, 2):
        pair = frozenset((first, second))
        # A direct link is seen from both ends.
        nvlinks = to_peers.get(pair, 0) // 2 + min(to_switches.get(first, 0), to_switches.get(second, 0))
        try:
            path = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[first], handles[second])
        except pynvml.NVMLError:
            # Virtual machines often hide it; a GPU that has just failed is told by its reading.
            path = None
        scores[pair] = nvlinks * _NVLINK_SCORE or _PATH_SCORES.get(path, 0)
    return GpuLinks(scores)


def _nvlink_remotes(handle: _Handle) -> Iterator[tuple[bool, str]]:
    """What is at the other end of each active NVLink: whether it is surely a GPU (and no NVSwitch), and its PCI
    bus id. A GPU that is lost may be known by neither, and is then not mistaken for a switch."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            bus_id = text_of(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower()
            kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, default=None)
            yield kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, bus_id
        except pynvml.NVMLError:
            # This model has no such link (links are numbered without gaps), or the GPU does not tell.
            return


def _ask(function: Callable[..., _T], *arguments: object, default: _T) -> _T:
    """What the GPU says, or the default where its model or driver has no answer. A lost GPU still raises."""
    try:
        return function(*arguments)
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLError_NoPermission,
    ):
        return default
