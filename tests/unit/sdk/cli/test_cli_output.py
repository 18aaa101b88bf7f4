"""What people read: sizes, times, and text that can not take the terminal over."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from outerproduct._cli import output as out
from outerproduct.v1.resources_pb2 import ComputeSpec


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * 1024**2, "512 MiB"),
        (1024**3 - 1, "1 GiB"),
        (80 * 1024**3, "80 GiB"),
        (3 * 1024**4 // 2, "1.5 TiB"),
        (5000 * 1024**4, "5000 TiB"),
    ],
)
def test_sizes_are_in_the_largest_unit_that_leaves_at_least_one(count: int, text: str) -> None:
    assert out.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0.4, "0s"), (59, "59s"), (60, "1m"), (61, "1m 1s"), (3725, "1h 2m"), (90_000, "1d 1h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert out.duration(seconds) == text


def test_a_time_that_is_not_set_is_empty() -> None:
    assert out.moment(Timestamp()) == ""
    assert out.moment(Timestamp(seconds=1_700_000_000)) == "2023-11-14 22:13:20 UTC"


def test_resources_are_read_as_people_say_them() -> None:
    asked = ComputeSpec(cpus=1, memory_bytes=32 * 1024**3, accelerator="L4", accelerator_count=2)
    assert out.resources(asked) == "1 CPU, 32 GiB, 2 x L4"
    assert out.resources(ComputeSpec(cpus=8, memory_bytes=1024**3, accelerator_count=1)) == "8 CPUs, 1 GiB, 1 x any GPU"
    assert out.resources(ComputeSpec(cpus=2, memory_bytes=1024**2)) == "2 CPUs, 1 MiB"


@given(st.text())
def test_no_text_can_give_orders_to_the_terminal(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t" for c in out.clean(text))


@given(st.text(st.characters(categories=["L", "N", "P"])))
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert out.clean(text) == text


def test_colours_of_a_log_leave_no_trace() -> None:
    assert out.clean("\x1b[2m2026\x1b[0m started") == "2026 started"
