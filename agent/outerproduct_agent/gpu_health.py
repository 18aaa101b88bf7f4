"""Which GPUs are well over time: readings and critical XID events in, an inventory with settled health out.

`HealthTracker` is pure. `XidWatcher` owns NVML's event set; it has no thread, somebody calls `poll`.
`GpuMonitor` puts both behind one call for the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml

from outerproduct_agent.gpus import ALL_GPUS, Gpu, GpuHealth, GpuInventory, GpuOffer, nvml, read_gpus, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# One bad reading is often a driver that was busy; three in a row are not.
_BAD_READINGS_TO_UNHEALTHY = 3
# Coming back takes longer than going, so that a GPU that flaps stays out.
_GOOD_READINGS_TO_HEALTHY = 5

# XIDs after which a GPU needs a reset, a reboot or a repair. Not among them: those that a program can cause
# (13, 31, 43, 45, 68, 94). Source: NVIDIA, "XID Errors", https://docs.nvidia.com/deploy/xid-errors/
_FATAL_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    62: "internal micro-controller halted",
    64: "row remapper failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    110: "security fault",
    119: "GSP did not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}

# More events than this in one poll are a storm; the rest waits for the next poll.
_MAX_EVENTS_PER_POLL = 1000


@dataclass(frozen=True, slots=True)
class XidEvent:
    """A critical error that the driver reported on a GPU (the whole one, also for its MIG devices)."""

    uuid: str
    xid: int


@dataclass(frozen=True, slots=True)
class _Record:
    gpu: Gpu
    healthy: bool
    reason: str
    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    fatal_xid: int = 0


class HealthTracker:
    """Turns readings into settled health.

    - A GPU that is first seen has the health of that reading.
    - Three bad readings in a row make it unhealthy, five good ones healthy again. A GPU that is missing from
      a reading, or a reading that failed as a whole, is a bad reading.
    - A fatal XID makes it unhealthy at once and for good, until `clear`.
    - A GPU that was seen once never vanishes: it stays in the inventory as unhealthy. A MIG device vanishes
      when its parent and all that the parent is split into were read well without it: the operator has split
      the GPU in another way.
    """

    def __init__(self) -> None:
        """A tracker that has seen no GPU."""
        self._records: dict[str, _Record] = {}

    def observe(self, reading: GpuInventory, events: tuple[XidEvent, ...] = ()) -> GpuInventory:
        """Take in a reading, and the events since the last one.

        Returns:
            The reading with settled health, and with the GPUs that are missing from it.
        """
        present = {gpu.uuid: gpu for gpu in reading.gpus}
        for uuid, record in list(self._records.items()):
            if uuid in present:
                continue
            if _read_well(record.gpu.mig_parent, present):
                del self._records[uuid]
            else:
                self._records[uuid] = _worse(_unread(record), reading.problem or _MISSING)
        for uuid, gpu in present.items():
            self._records[uuid] = _next(self._records.get(uuid), gpu)
        for event in events:
            if event.xid in _FATAL_XIDS:
                self._mark_fatal(event)
        missing = [uuid for uuid in self._records if uuid not in present]
        return replace(reading, gpus=tuple(_settled(self._records[uuid]) for uuid in [*present, *missing]))

    def clear(self, uuid: str) -> bool:
        """Forget what is held against a GPU, fatal XIDs included; its next reading decides.

        Returns:
            Whether the GPU is known.
        """
        return self._records.pop(uuid, None) is not None

    def _mark_fatal(self, event: XidEvent) -> None:
        for uuid, record in self._records.items():
            if event.uuid in (uuid, record.gpu.mig_parent):
                self._records[uuid] = replace(record, fatal_xid=event.xid)


_MISSING = "no longer found by the driver: fallen off the bus, or taken away"


def _read_well(parent: str, present: Mapping[str, Gpu]) -> bool:
    """Whether this parent (empty: of a whole GPU) and its MIG devices all answered."""
    family = [gpu for gpu in present.values() if parent in (gpu.uuid, gpu.mig_parent)]
    return parent in present and all(gpu.health is GpuHealth.HEALTHY for gpu in family)


def _unread(record: _Record) -> _Record:
    return replace(record, gpu=replace(record.gpu, use_known=False))


def _next(record: _Record | None, gpu: Gpu) -> _Record:
    good = gpu.health is GpuHealth.HEALTHY
    if record is None:
        return _Record(gpu, healthy=good, reason=gpu.reason)
    if not good:
        if gpu.use_known:
            return _worse(replace(record, gpu=gpu), gpu.reason)
        # It did not tell everything: what it is was read before.
        known = replace(record.gpu, index=gpu.index, use_known=False, excluded=gpu.excluded or record.gpu.excluded)
        return _worse(replace(record, gpu=known), gpu.reason)
    streak = record.good_in_a_row + 1
    healthy = record.healthy or streak >= _GOOD_READINGS_TO_HEALTHY
    return replace(
        record,
        gpu=gpu,
        healthy=healthy,
        reason="" if healthy else record.reason,
        bad_in_a_row=0,
        good_in_a_row=streak,
    )


def _worse(record: _Record, reason: str) -> _Record:
    streak = record.bad_in_a_row + 1
    healthy = record.healthy and streak < _BAD_READINGS_TO_UNHEALTHY
    return replace(record, healthy=healthy, reason="" if healthy else reason, bad_in_a_row=streak, good_in_a_row=0)


def _settled(record: _Record) -> Gpu:
    if record.fatal_xid:
        reason = f"XID {record.fatal_xid} ({_FATAL_XIDS[record.fatal_xid]}): reset the GPU, then clear it"
    else:
        reason = record.reason
    well = record.healthy and not record.fatal_xid
    return replace(record.gpu, health=GpuHealth.HEALTHY if well else GpuHealth.UNHEALTHY, reason=reason)


class XidWatcher:
    """NVML's event set for critical XIDs of all GPUs; holds NVML open until it is closed."""

    def __init__(self) -> None:
        """Register for the events of all GPUs that have them.

        Raises:
            pynvml.NVMLError: NVML cannot be opened, or has no event sets.
        """
        self._uuids: dict[int | None, str] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(nvml())
            self._events = pynvml.nvmlEventSetCreate()
            stack.callback(pynvml.nvmlEventSetFree, self._events)
            for index in range(pynvml.nvmlDeviceGetCount()):
                # Old GPUs have no events, a lost one accepts none; readings tell of both.
                with contextlib.suppress(pynvml.NVMLError):
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    # Remembered, because a lost GPU no longer tells its UUID.
                    self._uuids[_address(handle)] = text_of(pynvml.nvmlDeviceGetUUID(handle))
                    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            self._opened = stack.pop_all()

    @property
    def uuids(self) -> frozenset[str]:
        """The GPUs that are watched."""
        return frozenset(self._uuids.values())

    def poll(self) -> tuple[XidEvent, ...]:
        """The events since the last poll. Never waits.

        Raises:
            pynvml.NVMLError: the event set is broken, as after an upgrade of the driver.
        """
        found: list[XidEvent] = []
        while len(found) < _MAX_EVENTS_PER_POLL:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except (pynvml.NVMLError_Timeout, pynvml.NVMLError_GpuIsLost):
                # No more events, or one of the GPUs is gone, which the readings name.
                break
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None:
                found.append(XidEvent(uuid, int(event.eventData)))
        return tuple(found)

    def close(self) -> None:
        """Give the event set back; harmless when repeated."""
        with contextlib.suppress(pynvml.NVMLError):
            self._opened.close()


class GpuMonitor:
    """The GPUs of this machine over time. Every method blocks on NVML, and none may run beside another."""

    def __init__(self, *, offer: GpuOffer = ALL_GPUS, sys_root: Path = Path("/sys")) -> None:
        """A monitor that has not looked yet.

        Args:
            offer: GPUs that the operator lets the agent offer, by default all.
            sys_root: where sysfs is mounted.
        """
        self._offer = offer
        self._sys_root = sys_root
        self._tracker = HealthTracker()
        self._watcher: XidWatcher | None = None

    def poll(self) -> GpuInventory:
        """Read all GPUs. Finds GPUs whose driver came up after the agent, and survives one that goes away."""
        # Watch before reading, so that nothing falls between.
        events = self._events()
        reading = read_gpus(offer=self._offer, sys_root=self._sys_root)
        whole = {gpu.uuid for gpu in reading.gpus if not gpu.mig_parent}
        if self._watcher is not None and not whole <= self._watcher.uuids:
            self.close()
        return self._tracker.observe(reading, events)

    def clear(self, uuid: str) -> bool:
        """Give a GPU that was set aside another chance; its next reading decides.

        Returns:
            Whether the GPU is known.
        """
        return self._tracker.clear(uuid)

    def close(self) -> None:
        """Let go of NVML; the next `poll` takes it up again."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _events(self) -> tuple[XidEvent, ...]:
        try:
            self._watcher = self._watcher or XidWatcher()
            return self._watcher.poll()
        except pynvml.NVMLError:
            # No driver, one that has just been replaced, or one without events: the reading says which.
            self.close()
            return ()


def _address(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]
