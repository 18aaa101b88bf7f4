"""GPUs through a real engine on a machine without any: two L4 and two A100 with 80 GB.

NVML and NVIDIA's hook are stand-ins; between them are the real agent, scheduler and dockerd, so what a function finds
in /dev is what its device request gave it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outerproduct as op
from tests.fakes.gpu_runtime.engine import Asked, GpuEngine, gpu_engine
from tests.fakes.nvml.fake_nvml import FakeGpu, FakeNvml, Scenario
from tests.isolation import gpu_programs as programs
from tests.support.stack import Stack, running_stack

pytestmark = pytest.mark.docker

SECONDS = 120
MIB = 1024**2
MEMORY_BYTES = 128 * MIB
L4 = ("GPU-4a000000-0000-0000-0000-000000000000", "GPU-4a000000-0000-0000-0000-000000000001")
A100 = ("GPU-a1000000-0000-0000-0000-000000000002", "GPU-a1000000-0000-0000-0000-000000000003")
MACHINE = (*L4, *A100)


@pytest.fixture(scope="module")
def engine(hostile_image: str) -> Iterator[GpuEngine]:
    # The path of a Unix socket is bounded to 107 bytes, which pytest's own folders come near to.
    with gpu_engine(Path(tempfile.mkdtemp(prefix="op-gpu-")), MACHINE) as running:
        running.load_image(hostile_image)
        yield running


@pytest.fixture(scope="module")
def stack(engine: GpuEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    nvml = FakeNvml(tmp_path_factory.mktemp("nvml"))
    l4 = tuple(FakeGpu(uuid, "NVIDIA L4", 23034) for uuid in L4)
    a100 = tuple(FakeGpu(uuid, "NVIDIA A100-SXM4-80GB", 81920) for uuid in A100)
    nvml.show(Scenario(l4 + a100))
    with running_stack(tmp_path_factory.mktemp("stack"), agents=()) as running:
        running.add_agent("gpu", ("--docker-host", engine.url), nvml.environment)
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> op.OuterProductClient:
    return stack.client()


@pytest.fixture(scope="module")
def image(hostile_image: str) -> op.Image:
    return op.Image.from_registry(hostile_image)


def indices(uuids: tuple[str, ...]) -> set[str]:
    """Names of their device nodes."""
    return {f"nvidia{MACHINE.index(uuid)}" for uuid in uuids}


def test_a_call_with_a_gpu_sees_exactly_that_device(
    client: op.OuterProductClient, image: op.Image, engine: GpuEngine
) -> None:
    seen = client.run(fn=programs.look, image=image, gpu=1, gpu_type="L4", memory_bytes=MEMORY_BYTES).wait(SECONDS)
    [uuid] = seen["visible"].split(",")
    assert uuid in L4
    assert seen["devices"] == sorted(indices((uuid,)))
    assert engine.asked()[-1] == Asked((uuid,), frozenset({"compute", "utility"}))


def test_a_call_with_two_gpus_sees_both_of_one_type(client: op.OuterProductClient, image: op.Image) -> None:
    seen = client.run(fn=programs.look, image=image, gpu=2, gpu_type="L4", memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert set(seen["devices"]) == indices(L4)


def test_a_type_alone_means_one_gpu(client: op.OuterProductClient, image: op.Image) -> None:
    seen = client.run(fn=programs.look, image=image, gpu_type="A100-80GB", memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert len(seen["devices"]) == 1
    assert set(seen["devices"]) < indices(A100)


@pytest.mark.parametrize("name", ["A100", "a100", "a100-80gb"])
def test_a100_matches_both_its_sizes_in_any_case(client: op.OuterProductClient, image: op.Image, name: str) -> None:
    seen = client.run(fn=programs.look, image=image, gpu=1, gpu_type=name, memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert set(seen["devices"]) < indices(A100)


def test_a_count_alone_is_gpus_of_one_type(client: op.OuterProductClient, image: op.Image) -> None:
    seen = client.run(fn=programs.look, image=image, gpu=2, memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert set(seen["devices"]) in (indices(L4), indices(A100))


def test_calls_at_the_same_time_never_share_a_gpu(client: op.OuterProductClient, image: op.Image) -> None:
    ask: dict[str, Any] = {"image": image, "gpu": 1, "gpu_type": "L4", "memory_bytes": MEMORY_BYTES}
    runs = [client.run(fn=programs.look_for, args=(2.0,), **ask) for _ in range(2)]
    first, second = (run.wait(SECONDS) for run in runs)
    assert max(first["began"], second["began"]) < min(first["ended"], second["ended"]), "they did not overlap"
    assert not set(first["devices"]) & set(second["devices"])


def test_a_call_without_gpus_sees_none(client: op.OuterProductClient, image: op.Image, engine: GpuEngine) -> None:
    before = engine.asked()
    seen = client.run(fn=programs.look, image=image, memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert seen == {"devices": [], "visible": "void", "indices": None, "order": "PCI_BUS_ID"}
    assert engine.asked() == before, "the hook has not run at all"


def test_a_call_without_gpus_never_meets_nvidias_runtime(
    client: op.OuterProductClient, image: op.Image, engine: GpuEngine
) -> None:
    before = engine.containers_of_nvidias_runtime()
    client.run(fn=programs.look, image=image, memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert engine.containers_of_nvidias_runtime() == before
    client.run(fn=programs.look, image=image, gpu=1, memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert engine.containers_of_nvidias_runtime() == before + 1, "it is the default one"


def test_indices_of_the_image_do_not_reach_a_call_with_gpus(client: op.OuterProductClient, image: op.Image) -> None:
    seen = client.run(fn=programs.look, image=image, gpu=1, gpu_type="L4", memory_bytes=MEMORY_BYTES).wait(SECONDS)
    assert seen["indices"] is None


def test_a_type_that_no_node_has_is_refused_with_those_on_offer(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(op.UnsupportedConfiguration) as refused:
        client.run(fn=programs.look, image=image, gpu=1, gpu_type="H100", memory_bytes=MEMORY_BYTES)
    assert "L4" in str(refused.value)
    assert "A100-80GB" in str(refused.value)


@pytest.mark.parametrize(("count", "gpu_type"), [(3, "L4"), (3, None), (1, "A100-40GB")])
def test_more_than_any_node_has_is_refused(
    client: op.OuterProductClient, image: op.Image, count: int, gpu_type: str | None
) -> None:
    with pytest.raises(op.UnsupportedConfiguration):
        client.run(fn=programs.look, image=image, gpu=count, gpu_type=gpu_type, memory_bytes=MEMORY_BYTES)


def test_a_machine_with_two_kinds_shows_as_two_nodes(client: op.OuterProductClient) -> None:
    shown = {node.name: node.total_resources for node in client.list_nodes()}
    assert len(shown) == 2
    [main] = [name for name in shown if "/" not in name]
    [other] = [name for name in shown if "/" in name]
    assert main == "gpu"
    kinds = {name: (r.accelerator, r.accelerator_count) for name, r in shown.items() if r is not None}
    assert set(kinds.values()) == {("L4", 2), ("A100-80GB", 2)}
    assert other == f"gpu/{kinds[other][0]}"
    here, there = shown[main], shown[other]
    assert here is not None
    assert there is not None
    assert here.cpus >= 1
    assert (there.cpus, there.memory_bytes) == (0, 0)


def test_what_list_nodes_shows_is_what_gpu_type_takes(client: op.OuterProductClient, image: op.Image) -> None:
    available = set()
    for node in client.list_nodes():
        resources = node.total_resources
        if resources is not None:
            available.add((resources.accelerator, resources.accelerator_count))
    for gpu_type, _ in sorted(available):
        seen = client.run(fn=programs.look, image=image, gpu=1, gpu_type=gpu_type, memory_bytes=MEMORY_BYTES)
        assert len(seen.wait(SECONDS)["devices"]) == 1


def test_gpus_come_back_when_a_call_ends(client: op.OuterProductClient, image: op.Image) -> None:
    for _ in range(2):
        seen = client.run(fn=programs.look, image=image, gpu=2, gpu_type="A100", memory_bytes=MEMORY_BYTES)
        assert set(seen.wait(SECONDS)["devices"]) == indices(A100)
