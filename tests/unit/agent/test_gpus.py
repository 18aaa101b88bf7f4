"""Discovery and health of GPUs against a stand-in for NVIDIA's library that `pynvml` really loads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pynvml
import pytest
from tests.fakes.nvml.fake_nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeGpu,
    FakeNvml,
    FakeSlice,
    Probe,
    Scenario,
    bus_id,
)

from outerproduct_agent.gpus import GpuHealth, GpuInventory, GpuOffer, GpuProcess, read_gpus, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the fake NVML library")

SWITCH = "00000000:C5:00.0"


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def probe(fake: FakeNvml, tmp_path: Path) -> Iterator[Probe]:
    fake.show(Scenario())
    running = Probe(fake, tmp_path)
    yield running
    running.close()


def health(inventory: GpuInventory) -> dict[str, GpuHealth]:
    return {gpu.uuid: gpu.health for gpu in inventory.gpus}


def reason(inventory: GpuInventory, uuid: str) -> str:
    return next(gpu.reason for gpu in inventory.gpus if gpu.uuid == uuid)


WELL, ILL = GpuHealth.HEALTHY, GpuHealth.UNHEALTHY


class TestReading:
    def test_a_gpu_is_described(self, fake: FakeNvml, probe: Probe, tmp_path: Path) -> None:
        device = tmp_path / "bus/pci/devices/0000:3b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text("1\n")
        gpu = FakeGpu("GPU-a", "NVIDIA A100-SXM4-80GB", memory_mib=81920, used_mib=7, bus_id="00000000:3B:00.0")
        fake.show(Scenario((gpu,), driver_version="535.1"))
        inventory = probe.read()
        assert inventory.driver_version == "535.1"
        (found,) = inventory.gpus
        assert (found.uuid, found.index, found.type) == ("GPU-a", 0, "A100-80GB")
        assert (found.product_name, found.pci_bus_id) == ("NVIDIA A100-SXM4-80GB", "00000000:3B:00.0")
        assert (found.numa_node, found.memory_bytes, found.memory_used_bytes) == (1, 81920 << 20, 7 << 20)
        assert (found.health, found.reason, found.excluded) == (WELL, "", "")

    def test_the_numa_node_is_unknown_where_sysfs_does_not_tell(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        assert probe.read().gpus[0].numa_node == -1

    def test_a_driver_without_the_newer_memory_call_is_read_with_the_older(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a", old_memory_call=True),)))
        assert probe.read().gpus[0].memory_bytes == 23034 << 20

    def test_two_kinds_of_gpu_keep_their_own_types(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"), FakeGpu("GPU-b", "NVIDIA H100 80GB HBM3", memory_mib=81559))))
        assert [gpu.type for gpu in probe.read().gpus] == ["L4", "H100"]

    def test_processes_are_listed_with_their_memory(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a", processes=((4711, 300), (4712, 5))), FakeGpu("GPU-b"))))
        first, second = probe.read().gpus
        assert first.processes == (GpuProcess(4711, 300 << 20), GpuProcess(4712, 5 << 20))
        assert second.processes == ()

    def test_no_driver_is_a_machine_without_gpus(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario(init_error=DRIVER_NOT_LOADED))
        assert probe.read() == GpuInventory()

    def test_no_library_is_a_machine_without_gpus(self) -> None:
        # The process of the tests has no fake library.
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            assert read_gpus() == GpuInventory()
        else:
            pytest.skip("this machine has NVIDIA's library")

    def test_a_driver_that_does_not_match_its_library_is_a_problem_with_a_cure(
        self, fake: FakeNvml, probe: Probe
    ) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),), init_error=VERSION_MISMATCH))
        inventory = probe.read()
        assert inventory.gpus == ()
        assert "reboot" in inventory.problem

    def test_a_lost_gpu_does_not_hide_the_others(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a", error=GPU_IS_LOST), FakeGpu("GPU-b"), FakeGpu("GPU-c"))))
        inventory = probe.read()
        assert health(inventory) == {"GPU-b": WELL, "GPU-c": WELL}
        assert len(inventory.unreadable) == 1
        assert "GPU 0" in inventory.unreadable[0]
        assert inventory.links.between("GPU-b", "GPU-c") > 0

    def test_a_gpu_that_is_lost_while_it_is_read_is_unhealthy(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a", late_error=GPU_IS_LOST), FakeGpu("GPU-b"))))
        inventory = probe.read()
        assert health(inventory) == {"GPU-a": ILL, "GPU-b": WELL}
        assert "fallen off the bus" in reason(inventory, "GPU-a")

    @pytest.mark.parametrize(
        ("gpu", "words"),
        [
            (FakeGpu("GPU-a", uncorrectable_ecc_errors=2), "2 uncorrectable ECC errors"),
            (FakeGpu("GPU-a", remap_pending=True), "waits to be remapped"),
            (FakeGpu("GPU-a", remap_failed=True), "could not be remapped"),
            (FakeGpu("GPU-a", late_error=UNKNOWN), "could not read it"),
        ],
    )
    def test_faults_of_a_gpu_are_named(self, fake: FakeNvml, probe: Probe, gpu: FakeGpu, words: str) -> None:
        fake.show(Scenario((gpu,)))
        inventory = probe.read()
        assert health(inventory) == {"GPU-a": ILL}
        assert words in reason(inventory, "GPU-a")


class TestMig:
    A100 = FakeGpu(
        "GPU-a",
        "NVIDIA A100-SXM4-40GB",
        memory_mib=40536,
        slices=(
            FakeSlice("MIG-1", memory_mib=19968, gpu_slices=3, profile="3g.20gb"),
            FakeSlice("MIG-2", memory_mib=9856, gpu_slices=2),
        ),
    )

    def test_slices_are_devices_and_their_parent_is_not_offered(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((self.A100, FakeGpu("GPU-b"))))
        inventory = probe.read()
        assert [(gpu.uuid, gpu.type, gpu.mig_parent) for gpu in inventory.gpus] == [
            ("GPU-a", "A100-40GB", ""),
            ("MIG-1", "A100-40GB:3g.20gb", "GPU-a"),
            ("MIG-2", "A100-40GB:2g.10gb", "GPU-a"),
            ("GPU-b", "L4", ""),
        ]
        assert [bool(gpu.excluded) for gpu in inventory.gpus] == [True, False, False, False]
        assert inventory.gpus[1].memory_bytes == 19968 << 20

    def test_a_gpu_that_could_be_split_but_is_not_is_a_whole_one(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a", "NVIDIA A100-SXM4-40GB", memory_mib=40536, slices=None),)))
        (gpu,) = probe.read().gpus
        assert (gpu.type, gpu.excluded) == ("A100-40GB", "")

    def test_a_slice_that_does_not_answer_does_not_hide_the_others(self, fake: FakeNvml, probe: Probe) -> None:
        broken = FakeSlice("MIG-1", memory_mib=19968, gpu_slices=3, error=UNKNOWN)
        well = FakeSlice("MIG-2", memory_mib=9856, gpu_slices=2)
        fake.show(Scenario((FakeGpu("GPU-a", "NVIDIA A30", memory_mib=24576, slices=(broken, well)),)))
        slices = [gpu for gpu in probe.read().gpus if gpu.mig_parent]
        assert [gpu.health for gpu in slices] == [ILL, WELL]

    def test_a_fault_of_the_parent_is_one_of_its_slices(self, fake: FakeNvml, probe: Probe) -> None:
        slices = (FakeSlice("MIG-1", memory_mib=19968, gpu_slices=3),)
        fake.show(Scenario((FakeGpu("GPU-a", "NVIDIA A30", uncorrectable_ecc_errors=1, slices=slices),)))
        assert set(health(probe.read()).values()) == {ILL}


class TestLinks:
    def test_pcie_paths_are_ordered_by_closeness(self, fake: FakeNvml, probe: Probe) -> None:
        paths = {
            (0, 1): pynvml.NVML_TOPOLOGY_SINGLE,
            (0, 2): pynvml.NVML_TOPOLOGY_NODE,
            (0, 3): pynvml.NVML_TOPOLOGY_SYSTEM,
        }
        fake.show(Scenario(tuple(FakeGpu(f"GPU-{number}") for number in range(4)), paths=paths))
        links = probe.read().links
        near, middle, far = (links.between("GPU-0", f"GPU-{number}") for number in (1, 2, 3))
        assert near > middle > far > 0

    def test_each_direct_nvlink_counts(self, fake: FakeNvml, probe: Probe) -> None:
        gpus = (
            FakeGpu("GPU-0", nvlinks=(bus_id(1), bus_id(1), bus_id(2))),
            FakeGpu("GPU-1", nvlinks=(bus_id(0), bus_id(0))),
            FakeGpu("GPU-2", nvlinks=(bus_id(0),)),
        )
        fake.show(Scenario(gpus, paths={(1, 2): pynvml.NVML_TOPOLOGY_SINGLE}))
        links = probe.read().links
        twice, once, pcie = (
            links.between("GPU-0", "GPU-1"),
            links.between("GPU-0", "GPU-2"),
            links.between("GPU-1", "GPU-2"),
        )
        assert twice == 2 * once
        assert once > pcie > 0

    def test_gpus_on_a_switch_are_all_equally_close(self, fake: FakeNvml, probe: Probe) -> None:
        gpus = tuple(FakeGpu(f"GPU-{number}", nvlinks=(SWITCH,) * 18) for number in range(3))
        fake.show(Scenario(gpus, paths={(0, 1): pynvml.NVML_TOPOLOGY_SYSTEM}))
        links = probe.read().links
        scores = {links.between("GPU-0", "GPU-1"), links.between("GPU-0", "GPU-2")}
        assert len(scores) == 1
        assert scores.pop() > 1000

    def test_a_link_through_a_switch_counts_as_a_direct_one(self, fake: FakeNvml, probe: Probe) -> None:
        gpus = (
            FakeGpu("GPU-0", nvlinks=(bus_id(1), SWITCH)),
            FakeGpu("GPU-1", nvlinks=(bus_id(0),)),
            FakeGpu("GPU-2", nvlinks=(SWITCH,)),
        )
        fake.show(Scenario(gpus))
        links = probe.read().links
        assert links.between("GPU-0", "GPU-1") == links.between("GPU-0", "GPU-2")

    @pytest.mark.parametrize(
        "lost", [FakeGpu("GPU-0", error=GPU_IS_LOST), FakeGpu("GPU-0", uncorrectable_ecc_errors=1)]
    )
    def test_neighbours_of_a_lost_gpu_are_not_connected_by_it(
        self, fake: FakeNvml, probe: Probe, lost: FakeGpu
    ) -> None:
        neighbours = tuple(FakeGpu(f"GPU-{number}", nvlinks=(bus_id(0),)) for number in (1, 2))
        fake.show(Scenario((lost, *neighbours), paths={(1, 2): pynvml.NVML_TOPOLOGY_SYSTEM}))
        links = probe.read().links
        assert 0 < links.between("GPU-1", "GPU-2") < 100
        assert links.between("GPU-0", "GPU-1") == 0


class TestOffer:
    def test_only_the_named_gpus_are_offered_and_the_others_stay_visible(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"), FakeGpu("GPU-b"))))
        assert [bool(gpu.excluded) for gpu in probe.read("GPU-b").gpus] == [True, False]
        assert [bool(gpu.excluded) for gpu in probe.read("none").gpus] == [True, True]
        assert [bool(gpu.excluded) for gpu in probe.read("all").gpus] == [False, False]

    def test_naming_a_gpu_offers_its_slices(self) -> None:
        offer = GpuOffer.parse("GPU-a, MIG-9")
        assert offer.exclusion("MIG-1", "GPU-a") == ""
        assert offer.exclusion("MIG-9", "GPU-b") == ""
        assert offer.exclusion("MIG-8", "GPU-b") != ""

    @pytest.mark.parametrize("text", ["", "0", "0,1", "GPU-a,L4"])
    def test_what_is_not_a_uuid_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="nvidia-smi -L"):
            GpuOffer.parse(text)


class TestMonitor:
    def test_gpus_appear_when_the_driver_comes_up_after_the_agent(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario(init_error=DRIVER_NOT_LOADED))
        assert probe.poll(3).gpus == ()
        fake.show(Scenario((FakeGpu("GPU-a"), FakeGpu("GPU-b"))))
        assert health(probe.poll()) == {"GPU-a": WELL, "GPU-b": WELL}

    def test_a_gpu_that_falls_off_the_bus_is_set_aside_and_comes_back(self, fake: FakeNvml, probe: Probe) -> None:
        well = Scenario((FakeGpu("GPU-a"), FakeGpu("GPU-b")))
        fake.show(well)
        probe.poll()
        fake.show(Scenario((FakeGpu("GPU-a", error=GPU_IS_LOST), FakeGpu("GPU-b"))))
        assert health(probe.poll(2)) == {"GPU-a": WELL, "GPU-b": WELL}
        assert health(probe.poll()) == {"GPU-a": ILL, "GPU-b": WELL}
        fake.show(well)
        assert health(probe.poll(4))["GPU-a"] is ILL
        assert health(probe.poll())["GPU-a"] is WELL

    @pytest.mark.parametrize("failing", [FakeGpu("GPU-a", error=GPU_IS_LOST), FakeGpu("GPU-a", late_error=UNKNOWN)])
    def test_a_gpu_that_fails_to_answer_is_known_by_what_it_told_before_but_its_use_is_not(
        self, fake: FakeNvml, probe: Probe, failing: FakeGpu
    ) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        (before,) = probe.poll().gpus
        assert before.use_known
        fake.show(Scenario((failing,)))
        assert probe.poll().gpus == (replace(before, use_known=False),)

    def test_a_faulty_gpu_that_answers_tells_its_use(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        probe.poll()
        fake.show(Scenario((FakeGpu("GPU-a", used_mib=9, uncorrectable_ecc_errors=1),)))
        (gpu,) = probe.poll().gpus
        assert (gpu.use_known, gpu.memory_used_bytes) == (True, 9 << 20)

    def test_a_driver_upgrade_sets_all_gpus_aside_with_the_reason(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        probe.poll()
        fake.show(Scenario(init_error=VERSION_MISMATCH))
        inventory = probe.poll(3)
        assert health(inventory) == {"GPU-a": ILL}
        assert "differ in version" in reason(inventory, "GPU-a")

    def test_a_fatal_xid_sets_a_gpu_aside_until_it_is_cleared(self, fake: FakeNvml, probe: Probe) -> None:
        gpus = (FakeGpu("GPU-a"), FakeGpu("GPU-b"))
        fake.show(Scenario(gpus))
        probe.poll()
        fake.show(Scenario(gpus, xids=((1, 79),)))
        inventory = probe.poll()
        assert health(inventory) == {"GPU-a": WELL, "GPU-b": ILL}
        assert "XID 79" in reason(inventory, "GPU-b")
        assert health(probe.poll(20))["GPU-b"] is ILL
        assert probe.clear("GPU-b")
        assert health(probe.poll())["GPU-b"] is WELL

    def test_an_xid_is_attributed_to_a_gpu_that_is_lost_by_then(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"), FakeGpu("GPU-b"))))
        probe.poll()
        fake.show(Scenario((FakeGpu("GPU-a", error=GPU_IS_LOST), FakeGpu("GPU-b")), xids=((0, 79),)))
        assert "XID 79" in reason(probe.poll(), "GPU-a")

    def test_an_xid_of_a_program_changes_nothing(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        probe.poll()
        fake.show(Scenario((FakeGpu("GPU-a"),), xids=((0, 31), (0, 13))))
        assert health(probe.poll()) == {"GPU-a": WELL}

    def test_gpus_are_watched_when_they_appear_later(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((FakeGpu("GPU-a"),)))
        probe.poll()
        both = (FakeGpu("GPU-a"), FakeGpu("GPU-b"))
        fake.show(Scenario(both))
        probe.poll()
        fake.show(Scenario(both, xids=((1, 48),)))
        assert health(probe.poll()) == {"GPU-a": WELL, "GPU-b": ILL}

    def test_slices_vanish_when_the_gpu_is_split_in_another_way(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((TestMig.A100,)))
        probe.poll()
        fake.show(Scenario((replace(TestMig.A100, slices=None),)))
        inventory = probe.poll()
        assert [(gpu.uuid, gpu.excluded) for gpu in inventory.gpus] == [("GPU-a", "")]

    def test_a_slice_that_fails_to_answer_once_stays(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((TestMig.A100,)))
        probe.poll()
        first, second = TestMig.A100.slices or ()
        fake.show(Scenario((replace(TestMig.A100, slices=(replace(first, error=UNKNOWN), second)),)))
        inventory = probe.poll()
        assert health(inventory)["MIG-1"] is WELL
        fake.show(Scenario((TestMig.A100,)))
        assert health(probe.poll()) == {"GPU-a": WELL, "MIG-1": WELL, "MIG-2": WELL}

    def test_slices_of_a_gpu_that_is_lost_become_unhealthy(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((TestMig.A100,)))
        probe.poll()
        fake.show(Scenario((replace(TestMig.A100, late_error=GPU_IS_LOST),)))
        assert health(probe.poll(3)) == {"GPU-a": ILL, "MIG-1": ILL, "MIG-2": ILL}

    def test_a_fatal_xid_of_a_gpu_is_one_of_its_slices(self, fake: FakeNvml, probe: Probe) -> None:
        fake.show(Scenario((TestMig.A100,)))
        probe.poll()
        fake.show(Scenario((TestMig.A100,), xids=((0, 95),)))
        assert set(health(probe.poll()).values()) == {ILL}


@pytest.mark.parametrize("value", [b"NVIDIA L4\0\0\0", "NVIDIA L4\0\0", "NVIDIA L4", b"NVIDIA L4 "])
def test_names_are_text_whatever_the_binding_gives(value: bytes | str) -> None:
    assert text_of(value) == "NVIDIA L4"
