"""What is repeated and what never: the rules, and that the document has them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerproduct.v1 import call_pb2 as pb
from outerproduct_scheduler import retry

KINDS = list(pb.FailureKind.values())


def decide(kind: int, **facts: int | bool) -> retry.Again | None:
    defaults: dict[str, int | bool] = {
        "never_started": False, "started_attempts": 1, "failures_before_start": 0, "max_attempts": 0,
    }  # fmt: skip
    return retry.after_failure(kind, **{**defaults, **facts})  # type: ignore[arg-type]


def test_every_kind_of_failure_has_its_blame() -> None:
    assert set(retry.BLAME) == set(KINDS)


def test_every_kind_of_failure_is_in_the_document() -> None:
    text = (Path(__file__).parents[3] / "docs" / "failures.md").read_text()
    for kind in KINDS:
        if kind:
            name = pb.FailureKind.Name(kind).removeprefix("FAILURE_KIND_")
            assert f"`{name}`" in text, f"{name} is missing in docs/failures.md"


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_start_nothing_is_repeated_unless_the_user_says_so(kind: int) -> None:
    assert decide(kind) is None
    assert decide(kind, max_attempts=1) is None


@given(
    kind=st.sampled_from(KINDS),
    never_started=st.booleans(),
    started=st.integers(0, 20),
    failures=st.integers(0, 100),
    max_attempts=st.integers(0, 20),
)
def test_pauses_are_bounded_and_started_attempts_never_exceed_what_was_allowed(
    kind: int, never_started: bool, started: int, failures: int, max_attempts: int
) -> None:
    again = decide(
        kind,
        never_started=never_started,
        started_attempts=started,
        failures_before_start=failures,
        max_attempts=max_attempts,
    )
    if again is not None:
        assert 0 <= again.pause_seconds <= retry.LONGEST_PAUSE_SECONDS
        assert never_started or started < max(1, max_attempts)


def test_failures_before_the_start_have_an_allowance_of_their_own() -> None:
    for failures in range(retry.INFRASTRUCTURE_ALLOWANCE):
        again = decide(pb.FAILURE_KIND_CONTAINER_ENGINE, never_started=True, failures_before_start=failures)
        assert again is not None
        assert again.counts
        assert again.avoid_node
    last = retry.INFRASTRUCTURE_ALLOWANCE
    assert decide(pb.FAILURE_KIND_CONTAINER_ENGINE, never_started=True, failures_before_start=last) is None


def test_what_would_fail_the_same_way_again_is_final() -> None:
    for kind in (
        pb.FAILURE_KIND_IMAGE_HAS_NO_PYTHON,
        pb.FAILURE_KIND_PYTHON_VERSION_MISMATCH,
        pb.FAILURE_KIND_CANCELLED,
    ):
        assert decide(kind, never_started=True, max_attempts=10) is None
        assert decide(kind, max_attempts=10) is None
