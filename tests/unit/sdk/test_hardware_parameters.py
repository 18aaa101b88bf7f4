"""cpu, memory_bytes, gpu and gpu_type: what they mean and what is refused."""

from __future__ import annotations

import pytest

from outerproduct._resources import ComputeSpec, compute_spec

GIB = 1024**3


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, ComputeSpec(1, 2 * GIB)),
        ({"cpu": 8}, ComputeSpec(8, 16 * GIB)),
        ({"memory_bytes": GIB}, ComputeSpec(1, GIB)),
        ({"memory_bytes": 64 * 1024**2}, ComputeSpec(1, 64 * 1024**2)),
        ({"gpu_type": "L4"}, ComputeSpec(1, 2 * GIB, "L4", 1)),
        ({"gpu_type": "A100-80GB", "gpu": 2}, ComputeSpec(1, 2 * GIB, "A100-80GB", 2)),
        ({"gpu": 2}, ComputeSpec(1, 2 * GIB, "", 2)),
        ({"gpu": 0}, ComputeSpec(1, 2 * GIB)),
    ],
)
def test_what_is_asked_for(parameters: dict[str, object], expected: ComputeSpec) -> None:
    assert compute_spec(**{"cpu": 1, "memory_bytes": None, "gpu": None, "gpu_type": None} | parameters) == expected


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"cpu": 0}, ValueError),
        ({"cpu": -1}, ValueError),
        ({"cpu": 1.5}, TypeError),
        ({"cpu": 2.0}, TypeError),
        ({"cpu": "4"}, TypeError),
        ({"cpu": True}, TypeError),
        ({"cpu": None}, TypeError),
        ({"memory_bytes": 0}, ValueError),
        ({"memory_bytes": -1}, ValueError),
        ({"memory_bytes": 2.0 * GIB}, TypeError),
        ({"memory_bytes": "8GiB"}, TypeError),
        ({"memory_bytes": 64 * 1024**2 - 1}, ValueError),
        ({"memory_bytes": 8}, ValueError),
        ({"gpu": -1}, ValueError),
        ({"gpu": 0.5}, TypeError),
        ({"gpu": True}, TypeError),
        ({"gpu": "1"}, TypeError),
        ({"gpu_type": ""}, ValueError),
        ({"gpu_type": " "}, ValueError),
        ({"gpu_type": 4}, TypeError),
        ({"gpu_type": "L4", "gpu": 0}, ValueError),
    ],
)
def test_what_can_not_be_right_is_refused_by_name_and_value(
    parameters: dict[str, object], error: type[Exception]
) -> None:
    defaults: dict[str, object] = {"cpu": 1, "memory_bytes": None, "gpu": None, "gpu_type": None}
    with pytest.raises(error) as raised:
        compute_spec(**defaults | parameters)
    name, value = next(iter(parameters.items()))
    assert f"{name}={value!r}" in str(raised.value)
