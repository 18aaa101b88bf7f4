"""`map`: order, laziness, failures in their place, and a bounded number under way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.unit.sdk import programs
from tests.unit.sdk.fake_scheduler import FakeScheduler

import outerproduct as op
from outerproduct import _client


def test_results_come_in_input_order(client: op.OuterProductClient, image: op.Image) -> None:
    assert list(client.map(programs.double, range(450), image=image)) == [2 * x for x in range(450)]


def test_iterables_are_zipped_to_the_shortest(client: op.OuterProductClient, image: op.Image) -> None:
    longer = iter(range(10))
    assert list(client.map(programs.add, [1, 2], longer, image=image)) == [1, 3]
    assert next(longer) == 2


def test_no_input_gives_no_result(client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image) -> None:
    assert list(client.map(programs.double, [], image=image)) == []
    assert scheduler.specs == []


def test_nothing_is_submitted_before_the_first_step_and_everything_by_it(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    results = client.map(programs.double, range(300), image=image)
    assert scheduler.specs == []
    assert next(results) == 0
    assert len(scheduler.specs) == 300


def test_mistakes_are_told_before_the_first_step(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(ValueError, match="cpu=0"):
        client.map(programs.double, [1], image=image, cpu=0)
    with pytest.raises(TypeError, match="image="):
        client.map(programs.double, [1], image="python")  # type: ignore[call-overload]


def test_a_failure_raises_when_its_place_is_reached(client: op.OuterProductClient, image: op.Image) -> None:
    results = client.map(programs.fail_on_three, range(6), image=image)
    assert list(itertools.islice(results, 3)) == [0, 1, 2]
    with pytest.raises(op.FunctionRaised, match="three"):
        next(results)


def test_closing_it_leaves_what_was_submitted(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    results = client.map(programs.double, range(10), image=image)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert [run.wait() for run in client.list_runs()] == [2 * x for x in reversed(range(10))]


def test_an_endless_generator_is_taken_only_as_results_are(
    client: op.OuterProductClient, image: op.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "MAP_WINDOW", 20)
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        for x in itertools.count():
            taken += 1
            yield x

    results = client.map(programs.double, endless(), image=image)
    assert list(itertools.islice(results, 50)) == [2 * x for x in range(50)]
    assert taken <= 70


def test_large_inputs_are_spread_over_several_requests(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    inputs = [bytes([x]) * 200_000 for x in range(60)]
    assert list(client.map(lambda data: data, inputs, image=image)) == inputs
    assert scheduler.specs[0].arguments.WhichOneof("content") == "inline"


def test_the_parameters_of_run_apply_to_each(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    list(client.map(programs.double, [1, 2], image=image, gpu_type="L4", name="sweep"))
    assert [(spec.compute.accelerator, spec.display_name) for spec in scheduler.specs] == [("L4", "sweep")] * 2
