"""Which offered accelerator types satisfy which requested names."""

import pytest

from outerproduct_scheduler.accelerators import is_mig_slice, matches, matching

OFFERED = ["A100-40GB", "A100-80GB", "A100-40GB:3g.20gb", "A10G", "L4", "L40S", "H100", "RTX-4090", "RTX-A6000-48GB"]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("A100", ("A100-40GB", "A100-80GB")),
        ("a100", ("A100-40GB", "A100-80GB")),
        ("A100-80GB", ("A100-80GB",)),
        ("a100-80gb", ("A100-80GB",)),
        ("A100-8", ()),
        ("A10", ()),
        ("L4", ("L4",)),
        ("RTX", ()),
        ("RTX-A6000", ("RTX-A6000-48GB",)),
        ("A100-40GB:3g.20gb", ("A100-40GB:3g.20gb",)),
        ("A100-40GB:3G.20GB", ("A100-40GB:3g.20gb",)),
        ("", ("A100-40GB", "A100-80GB", "A10G", "H100", "L4", "L40S", "RTX-4090", "RTX-A6000-48GB")),
    ],
)
def test_a_request_takes_exactly_the_types_it_means(requested: str, expected: tuple[str, ...]) -> None:
    assert matching(requested, OFFERED) == expected


def test_a_mig_slice_is_told_from_a_whole_gpu() -> None:
    assert is_mig_slice("A100-40GB:3g.20gb")
    assert not is_mig_slice("A100-40GB")


def test_a_whole_gpu_never_satisfies_a_request_for_a_slice() -> None:
    assert not matches("A100-40GB:3g.20gb", "A100-40GB")
