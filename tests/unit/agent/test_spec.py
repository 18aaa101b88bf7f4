"""What an Attempt may ask for."""

import pytest

from outerproduct_agent.spec import ComputeSpec


def test_gpus_need_a_type_and_a_count() -> None:
    assert ComputeSpec(1, 1).accelerator == ""
    assert ComputeSpec(1, 1, "L4", 2).accelerator_count == 2


@pytest.mark.parametrize(
    ("cpus", "memory_bytes", "accelerator", "accelerator_count"),
    [(0, 1, "", 0), (1, 0, "", 0), (1, 1, "L4", 0), (1, 1, "", 1), (1, 1, "L4", -1)],
)
def test_what_cannot_be_given_is_refused(
    cpus: int, memory_bytes: int, accelerator: str, accelerator_count: int
) -> None:
    with pytest.raises(ValueError, match="ComputeSpec"):
        ComputeSpec(cpus, memory_bytes, accelerator, accelerator_count)
