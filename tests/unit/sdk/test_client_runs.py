"""`run`, handles and `wait`, against a scheduler on a real port."""

from __future__ import annotations

import io
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sdk import programs
from tests.unit.sdk.fake_scheduler import FakeScheduler, Refused

import outerproduct as op
from outerproduct import _source

GIB = 1024**3


def test_a_run_is_submitted_with_all_that_was_said(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    run = client.run(
        fn=programs.add,
        args=(1,),
        kwargs={"b": 2},
        image=image.with_uv_pip_install("numpy"),
        name="first",
        cpu=4,
        gpu_type="L4",
        env_vars={"KEY": "value"},
        retry_strategy=op.RetryStrategy(max_attempts=3),
        timeout_seconds=60,
        priority=5,
        labels={"team": "x"},
    )
    [spec] = scheduler.specs
    assert spec.function.qualified_name == "tests.unit.sdk.programs:add"
    assert (spec.compute.cpus, spec.compute.memory_bytes) == (4, 8 * GIB)
    assert (spec.compute.accelerator, spec.compute.accelerator_count) == ("L4", 1)
    assert (spec.image.base, list(spec.image.layers[0].packages)) == ("python:3.12-slim", ["numpy"])
    assert dict(spec.env_vars) == {"KEY": "value"}
    assert (spec.retry_strategy.max_attempts, spec.timeout_seconds, spec.priority) == (3, 60.0, 5)
    assert (dict(spec.labels), spec.display_name) == ({"team": "x"}, "first")
    assert [(preview.name, preview.value) for preview in spec.argument_previews] == [("a", "1"), ("b", "2")]
    assert run.wait() == 3


def test_a_function_by_name_brings_its_source_once(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    for _ in range(3):
        client.run(fn=programs.add, args=(1,), image=image)
    [digest] = scheduler.uploads
    with tarfile.open(fileobj=io.BytesIO(scheduler.blobs[digest])) as tar:
        assert "tests/unit/sdk/programs.py" in tar.getnames()
    assert {spec.function.source.sha256 for spec in scheduler.specs} == {digest}


def test_large_arguments_and_results_go_through_blobs(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    large = b"x" * 5_000_000
    assert client.run(fn=lambda data: data + b"y", args=(large,), image=image).wait() == large + b"y"
    assert scheduler.specs[0].arguments.WhichOneof("content") == "blob"


def test_an_exception_of_the_function_is_raised_with_its_cause_and_traceback(
    client: op.OuterProductClient, image: op.Image
) -> None:
    run = client.run(fn=programs.fail_on_three, args=(3,), image=image)
    with pytest.raises(op.FunctionRaised, match="three") as raised:
        run.wait()
    assert "in fail_on_three" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.failure is not None
    assert (raised.value.kind, raised.value.failure.exception_type) == ("EXCEPTION", "builtins.ValueError")


def test_wait_looks_once_with_zero_and_the_work_goes_on(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.held.add("tests.unit.sdk.programs:double")
    run = client.run(fn=programs.double, args=(4,), image=image)
    with pytest.raises(TimeoutError, match=r"waiting for a CPU.*it goes on"):
        run.wait(timeout=0)
    assert scheduler.waits == 1
    assert run.refresh().status == op.RunStatus.RUNNING
    scheduler.release()
    assert run.wait(timeout=0) == 8


def test_handles_are_snapshots(client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image) -> None:
    scheduler.held.add("tests.unit.sdk.programs:double")
    run = client.run(fn=programs.double, args=(4,), image=image)
    assert isinstance(run, op.Run)
    scheduler.release()
    assert run.status == "running"
    later = run.refresh()
    assert later.status is op.RunStatus.COMPLETED
    assert later.name == run.name == f"runs/{run.id}"
    assert later.root_call.created_at is not None
    assert later.root_call.created_at.utcoffset() == timedelta(0)


def test_cancel_gives_a_new_handle_and_wait_says_so(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.held.add("tests.unit.sdk.programs:double")
    run = client.run(fn=programs.double, args=(4,), image=image)
    run.cancel()
    with pytest.raises(op.Cancelled, match="cancelled by alice"):
        run.wait()


async def test_calls_and_attempts_of_a_run(client: op.OuterProductClient, image: op.Image) -> None:
    run = await client.run.aio(fn=programs.double, args=(4,), image=image)
    assert isinstance(run, op.Run)
    [call] = await run.calls()
    assert (call.name, call.function) == (run.root_call.name, "tests.unit.sdk.programs:double")
    assert await client.list_calls(run, parent_call=call) == await call.children() == []
    [attempt] = await call.attempts()
    assert (attempt.id, attempt.number, attempt.node, attempt.exit_code) == ("1", 1, "gpu-1", 0)
    assert attempt.allocation is not None
    assert attempt.allocation["cpu_ids"] == "0-3"
    assert attempt.result() == 8


async def test_an_attempt_that_runs_has_no_result(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.held.add("tests.unit.sdk.programs:double")
    run = await client.run.aio(fn=programs.double, args=(4,), image=image)
    assert isinstance(run, op.Run)
    [attempt] = await client.list_attempts(run.root_call)
    assert attempt.exit_code is None
    with pytest.raises(RuntimeError, match="has not ended"):
        attempt.result()


def test_logs_go_on_after_a_lost_connection_without_a_gap(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image
) -> None:
    scheduler.log_pieces = [b"one\n", b"\xff", b"three\n"]
    scheduler.broken_log_streams = 1
    run = client.run(fn=programs.double, args=(4,), image=image)
    assert [piece.data for piece in run.logs(follow=True)] == scheduler.log_pieces


def test_completed_runs_of_a_list_give_their_values(client: op.OuterProductClient, image: op.Image) -> None:
    for x in range(5):
        client.run(fn=programs.double, args=(x,), image=image)
    assert [run.wait() for run in client.list_runs()] == [8, 6, 4, 2, 0]
    assert [run.wait() for run in client.list_runs(page_size=3)] == [8, 6, 4]


def test_a_name_an_id_or_a_handle_will_do(client: op.OuterProductClient, image: op.Image) -> None:
    run = client.run(fn=programs.double, args=(1,), image=image)
    assert {client.get_run(known).name for known in (run, run.name, run.id)} == {run.name}  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        client.get_run(7)  # type: ignore[arg-type]


def test_the_loop_of_the_hardware_page_works(client: op.OuterProductClient) -> None:
    found = set()
    for node in client.list_nodes():
        resources: op.ComputeResources | None = node.total_resources
        if resources is not None and resources.accelerator:
            found.add((resources.accelerator, resources.accelerator_count))
    assert found == {("L4", 4)}
    assert client.list_nodes()[0].status.allocated_resources.cpus == 2


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("FAILED_PRECONDITION", op.UnsupportedConfiguration),
        ("INVALID_ARGUMENT", ValueError),
        ("NOT_FOUND", op.NotFound),
        ("PERMISSION_DENIED", op.AccessDenied),
        ("ALREADY_EXISTS", op.ChildMismatch),
        ("RESOURCE_EXHAUSTED", op.OuterProductError),
    ],
)
def test_refusals_become_the_errors_that_fit(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image, code: str, expected: type[Exception]
) -> None:
    scheduler.refusals.append(Refused(code, "no node has an H100: gpu-1 has L4"))
    with pytest.raises(expected, match="gpu-1 has L4") as raised:
        client.run(fn=programs.add, args=(1,), image=image)
    assert isinstance(raised.value, expected)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"image": "python:3.12"}, "image="),
        ({"name": 5}, "name="),
        ({"volumes": {"/data": "v"}}, "volumes"),
        ({"env_vars": {"1A": "x"}}, "'1A'"),
        ({"env_vars": {"A": 1}}, "value of A"),
        ({"env_vars": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "NVIDIA_VISIBLE_DEVICES"),
        ({"env_vars": {"OUTERPRODUCT_SOCKET": "x"}}, "OUTERPRODUCT_SOCKET"),
        ({"retry_strategy": 3}, "retry_strategy="),
        ({"timeout_seconds": 0}, "timeout_seconds="),
        ({"timeout_seconds": float("nan")}, "timeout_seconds="),
        ({"priority": 5000}, "priority="),
        ({"labels": {"a": 1}}, "labels"),
        ({"cpu": 0}, "cpu=0"),
    ],
)
def test_parameters_are_checked_before_anything_is_sent(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image, parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        client.run(**{"fn": programs.add, "args": (1,), "image": image, **parameters})
    assert named in str(raised.value)
    assert scheduler.authorizations == []


def test_a_secret_value_is_not_shown_in_the_error(client: op.OuterProductClient, image: op.Image) -> None:
    with pytest.raises(ValueError, match="TOKEN") as raised:
        client.run(fn=programs.add, args=(1,), image=image, env_vars={"TOKEN": "hunter2\0"})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("value", "attempts"), [(None, 0), (0, 0), (1, 1), (5, 5)])
def test_retry_strategy_counts_attempts_in_all(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image, value: int | None, attempts: int
) -> None:
    client.run(fn=programs.add, args=(1,), image=image, retry_strategy=op.RetryStrategy(max_attempts=value))
    assert scheduler.specs[0].retry_strategy.max_attempts == attempts


def test_local_files_of_an_image_are_uploaded(
    client: op.OuterProductClient, scheduler: FakeScheduler, image: op.Image, tmp_path: Path
) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh")
    (tmp_path / "tool").chmod(0o755)
    client.run(
        fn=programs.add,
        args=(1,),
        image=image.add_local_file(tmp_path / "tool", "/bin/tool").add_local_dir(tmp_path, "/data"),
    )
    file, folder = scheduler.specs[0].image.mounts
    assert (file.remote_path, file.is_directory, file.mode) == ("/bin/tool", False, 0o755)
    assert scheduler.blobs[file.content.sha256] == b"#!/bin/sh"
    assert folder.is_directory
    assert scheduler.blobs[folder.content.sha256] == _source.folder_archive(tmp_path)


def test_an_image_of_the_module_whose_files_are_missing_is_no_error_for_others(
    client: op.OuterProductClient, image: op.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "OTHER", image.add_local_dir(tmp_path / "nothing", "/data"), raising=False)
    assert client.run(fn=programs.add, args=(1,), image=image).wait() == 2


def test_run_attributes_are_none_outside_a_container(client: op.OuterProductClient) -> None:
    assert (client.run_id, client.call_id, client.attempt) == (None, None, None)


async def test_the_client_is_an_async_context_manager(scheduler: FakeScheduler, image: op.Image) -> None:
    async with op.init("op_test_key", scheduler.address) as client:
        run = await client.run.aio(fn=programs.asynchronous, args=(1,), image=image)
        assert await run.wait.aio() == 1


def test_annotations_of_the_hardware_page_are_valid_at_run_time() -> None:
    assert isinstance(op.Run[object] | op.Call[object], object)
    assert isinstance(None, op.ComputeResources | None)
