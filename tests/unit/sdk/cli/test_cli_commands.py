"""The commands that ask the scheduler: what they print, what they send, and with which exit code they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_scheduler import KEY, FakeScheduler

from outerproduct import __version__
from outerproduct._cli.main import COMMANDS, main
from outerproduct.v1 import call_pb2, node_service_pb2, resources_pb2, run_service_pb2

RUN = "runs/3f0c9f1e-5f3a-4b55-9c3f-0a1b2c3d4e5f"
CALL = f"{RUN}/calls/0"
ATTEMPT = f"{CALL}/attempts/1"
GIB = 1024**3


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="outerproduct")


def a_node(name: str = "gpu-1", **status: Any) -> node_service_pb2.Node:
    return node_service_pb2.Node(
        name=name,
        total_resources=resources_pb2.ComputeResources(
            cpus=32, memory_bytes=256 * GIB, accelerator="L4", accelerator_count=4
        ),
        status=node_service_pb2.NodeStatus(
            **{
                "condition": node_service_pb2.NODE_CONDITION_READY,
                "allocated_resources": resources_pb2.ComputeResources(
                    cpus=12, memory_bytes=56 * GIB, accelerator="L4", accelerator_count=1
                ),
                "attempt_count": 2,
                **status,
            }
        ),
    )


def a_call(**fields: Any) -> call_pb2.Call:
    return call_pb2.Call(
        **{
            "name": CALL,
            "run": RUN,
            "function": "train:main",
            "status": call_pb2.CALL_STATUS_RUNNING,
            "compute": resources_pb2.ComputeSpec(cpus=8, memory_bytes=16 * GIB),
            **fields,
        }
    )


def a_run(name: str = RUN, **call: Any) -> call_pb2.Run:
    return call_pb2.Run(name=name, created_by="ann", status=call_pb2.RUN_STATUS_RUNNING, root_call=a_call(**call))


# --- nodes


def test_nodes_shows_what_is_free_of_what_there_is_on_every_page(scheduler: FakeScheduler) -> None:
    scheduler.nodes = {"gpu-1": a_node(), "gpu-2": a_node("gpu-2", condition=node_service_pb2.NODE_CONDITION_DRAINING)}
    result = invoke("nodes")
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()
    assert header.split() == ["NODE", "STATE", "CPUS", "MEMORY", "GPUS", "ATTEMPTS", "SEEN", "REASON"]
    assert first.split() == ["gpu-1", "READY", "20/32", "200", "GiB/256", "GiB", "3/4", "L4", "2"]
    assert second.split()[:2] == ["gpu-2", "DRAINING"]
    assert scheduler.requests[0].include_unavailable


def test_what_comes_from_outside_is_neither_markup_nor_an_order_to_the_terminal(scheduler: FakeScheduler) -> None:
    scheduler.nodes = {"gpu-1": a_node(reason="[/] \x1b]0;title\x07 [bold]")}
    line = invoke("nodes").stdout.splitlines()[1]
    assert "[/] \N{REPLACEMENT CHARACTER}]0;title" in line
    assert "[bold]" in line
    assert "\x1b" not in line


def test_json_is_protobuf_json_with_all_fields(scheduler: FakeScheduler) -> None:
    scheduler.nodes = {"gpu-1": a_node()}
    (node,) = json.loads(invoke("nodes", "--output", "json").stdout)["nodes"]
    assert node["status"]["condition"] == "NODE_CONDITION_READY"
    assert node["totalResources"]["memoryBytes"] == str(256 * GIB)
    assert node["agentVersion"] == ""


def test_no_nodes_is_said_on_stderr(scheduler: FakeScheduler) -> None:
    result = invoke("nodes")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "outerproduct up" in result.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1d", 86_400)])
def test_the_deadline_of_drain_is_a_duration(scheduler: FakeScheduler, text: str, seconds: float) -> None:
    scheduler.nodes = {"gpu-1": a_node()}
    assert invoke("drain", "gpu-1", "--deadline", text, "--reason", "new fan").exit_code == 0
    assert scheduler.requests == [
        node_service_pb2.DrainNodeRequest(name="gpu-1", deadline_seconds=seconds, reason="new fan")
    ]


@pytest.mark.parametrize("text", ["soon", "-5", "5x", "", "1e3"])
def test_a_deadline_that_is_no_duration_is_refused(scheduler: FakeScheduler, text: str) -> None:
    result = invoke("drain", "gpu-1", f"--deadline={text}")
    assert result.exit_code == 2
    assert "must be a number of seconds" in result.stderr
    assert scheduler.requests == []


def test_cordon_sends_the_reason_and_prints_the_state(scheduler: FakeScheduler) -> None:
    scheduler.nodes = {"gpu-1": a_node(condition=node_service_pb2.NODE_CONDITION_CORDONED, reason="new disk")}
    result = invoke("cordon", "gpu-1", "--reason", "new disk")
    assert result.stdout == "gpu-1: CORDONED (new disk), 2 Attempts on it\n"
    assert scheduler.requests == [node_service_pb2.CordonNodeRequest(name="gpu-1", reason="new disk")]


def test_label_replaces_and_clears_only_when_told(scheduler: FakeScheduler) -> None:
    scheduler.nodes = {"gpu-1": a_node()}
    assert invoke("label", "gpu-1", "site=berlin", "rack=a=b").stdout == "gpu-1: rack=a=b, site=berlin\n"
    assert invoke("label", "gpu-1").exit_code == 2
    assert invoke("label", "gpu-1", "site").exit_code == 2
    assert invoke("label", "gpu-1", "site=x", "--clear").exit_code == 2
    assert invoke("label", "gpu-1", "--clear").stdout == "gpu-1: no labels\n"


# --- runs, cancel


def test_runs_shows_why_a_run_waits(scheduler: FakeScheduler) -> None:
    scheduler.runs = {RUN: a_run(pending_reason="waiting for 8 CPUs: gpu-1 has 4 of 32 free")}
    line = invoke("runs").stdout.splitlines()[1]
    assert line.startswith(RUN.removeprefix("runs/"))
    assert line.endswith("waiting for 8 CPUs: gpu-1 has 4 of 32 free")
    assert "8 CPUs, 16 GiB" in line


def test_runs_stops_at_its_limit_and_asks_for_no_more(scheduler: FakeScheduler) -> None:
    scheduler.runs = {str(number): a_run(f"runs/{number}") for number in range(5)}
    found = json.loads(invoke("runs", "--limit", "3", "-o", "json").stdout)["runs"]
    assert [run["name"] for run in found] == ["runs/0", "runs/1", "runs/2"]
    assert len(scheduler.requests) == 1


def test_cancel_takes_runs_by_id_and_calls_by_name(scheduler: FakeScheduler) -> None:
    scheduler.runs = {RUN: a_run()}
    scheduler.calls = {CALL: a_call(status=call_pb2.CALL_STATUS_CANCELLING)}
    result = invoke("cancel", RUN.removeprefix("runs/"), CALL)
    assert result.stdout == f"{RUN}: RUNNING\n{CALL}: CANCELLING\n"
    assert scheduler.requests == [
        run_service_pb2.CancelRunRequest(name=RUN),
        run_service_pb2.CancelCallRequest(name=CALL),
    ]


def test_cancel_of_what_can_not_be_cancelled_cancels_nothing(scheduler: FakeScheduler) -> None:
    scheduler.runs = {RUN: a_run()}
    result = invoke("cancel", RUN, ATTEMPT)
    assert result.exit_code == 2
    assert "name its Call" in result.stderr
    assert scheduler.requests == []


# --- describe


def test_describe_shows_a_failure_with_its_numbers(scheduler: FakeScheduler) -> None:
    failure = call_pb2.Failure(
        kind=call_pb2.FAILURE_KIND_OUT_OF_MEMORY,
        message="Out of memory: raise memory_bytes.",
        memory_limit_bytes=GIB,
        memory_peak_bytes=GIB,
        shm_bytes=GIB // 2,
        node="gpu-1",
    )
    call = a_call(status=call_pb2.CALL_STATUS_FAILED, outcome=call_pb2.Outcome(failure=failure))
    scheduler.calls = {CALL: call}
    scheduler.attempts = {
        ATTEMPT: call_pb2.Attempt(
            name=ATTEMPT,
            call=CALL,
            number=1,
            status=call_pb2.ATTEMPT_STATUS_FAILED,
            node="gpu-1",
            allocation=resources_pb2.Allocation(cpu_ids="0-7", numa_nodes="0", memory_bytes=GIB, gpu_uuids=["GPU-1"]),
        )
    }
    shown = invoke("describe", CALL).stdout
    assert "OUT_OF_MEMORY" in shown
    assert "limit 1 GiB, peak 1 GiB, /dev/shm 512 MiB" in shown
    assert "Out of memory: raise memory_bytes." in shown
    assert "CPUs 0-7, NUMA 0, 1 GiB, GPU-1" in shown


def test_describe_of_a_run_shows_its_tree(scheduler: FakeScheduler) -> None:
    child = a_call(name=f"{CALL}.0", parent_call=CALL, function="train:part", pending_reason="waiting for 8 CPUs")
    scheduler.runs = {RUN: a_run()}
    scheduler.calls = {CALL: a_call(), child.name: child}
    shown = invoke("describe", RUN).stdout
    assert f"Run {RUN}" in shown
    assert f"Call {CALL}" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith(child.name)]
    assert "train:part" in line
    assert line.endswith("waiting for 8 CPUs")


def test_describe_of_a_node_shows_every_gpu(scheduler: FakeScheduler) -> None:
    node = a_node()
    node.gpus.add(uuid="GPU-a", type="L4", state=resources_pb2.GPU_STATE_ALLOCATED, attempt=ATTEMPT, numa_node=-1)
    node.gpus.add(uuid="GPU-b", type="L4", state=resources_pb2.GPU_STATE_UNHEALTHY, reason="Xid 79", index=1)
    scheduler.nodes = {"gpu-1": node}
    shown = invoke("describe", "gpu-1").stdout
    assert "12 of 32 given out" in shown
    assert [line.split()[2] for line in shown.splitlines() if " L4 " in line and "GPU-" in line] == [
        "ALLOCATED",
        "UNHEALTHY",
    ]
    assert "Xid 79" in shown


@pytest.mark.parametrize(
    ("name", "keys"), [(RUN, {"run", "calls", "attempts"}), (CALL, {"call", "children", "attempts"})]
)
def test_describe_as_json_has_a_key_for_each_part(scheduler: FakeScheduler, name: str, keys: set[str]) -> None:
    scheduler.runs, scheduler.calls = {RUN: a_run()}, {CALL: a_call()}
    assert json.loads(invoke("describe", name, "-o", "json").stdout).keys() == keys


# --- logs


def with_logs(scheduler: FakeScheduler, *attempts: tuple[str, bytes]) -> None:
    for name, data in attempts:
        scheduler.attempts[name] = call_pb2.Attempt(name=name, call=CALL)
        scheduler.logs[name] = [
            run_service_pb2.ReadLogsResponse(stream=run_service_pb2.LOG_STREAM_STDOUT, data=data),
            run_service_pb2.ReadLogsResponse(
                stream=run_service_pb2.LOG_STREAM_STDERR, data=b"careful\n", dropped_bytes=7
            ),
        ]


def test_logs_keeps_bytes_and_streams(scheduler: FakeScheduler) -> None:
    with_logs(scheduler, (ATTEMPT, b"50 %\r100 %\n\xff"))
    scheduler.runs = {RUN: a_run()}
    scheduler.calls = {CALL: a_call(latest_attempt=ATTEMPT)}
    result = invoke("logs", RUN)
    assert result.exit_code == 0
    assert result.stdout_bytes == b"50 %\r100 %\n\xff"
    assert result.stderr == "\n[7 bytes of output were dropped here]\ncareful\n"


def test_logs_follow_goes_on_with_the_next_attempt(scheduler: FakeScheduler) -> None:
    second = f"{CALL}/attempts/2"
    with_logs(scheduler, (ATTEMPT, b"first\n"), (second, b"second\n"))
    scheduler.calls = {CALL: a_call(latest_attempt=ATTEMPT, attempt_count=1)}
    result = invoke("logs", "-f", CALL)
    assert result.stdout == "first\nsecond\n"
    assert f"==> {second}" in result.stderr


def test_logs_of_a_call_that_waits_says_for_what(scheduler: FakeScheduler) -> None:
    scheduler.calls = {CALL: a_call(pending_reason="waiting for 8 CPUs")}
    result = invoke("logs", CALL)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "waiting for 8 CPUs" in result.stderr


def test_logs_of_a_node_are_refused(scheduler: FakeScheduler) -> None:
    assert invoke("logs", "gpu-1").exit_code == 2


# --- failures


@pytest.mark.parametrize("command", [["describe", RUN], ["logs", CALL], ["cancel", RUN], ["cordon", "gpu-9"]])
def test_what_does_not_exist_is_exit_code_4(scheduler: FakeScheduler, command: list[str]) -> None:
    result = invoke(*command)
    assert result.exit_code == 4
    happened, subject, remedy = result.stderr.splitlines()
    assert happened.startswith("error: ")
    assert subject.endswith("does not exist")
    assert remedy.startswith("  → ")


def test_a_refused_key_is_exit_code_5(scheduler: FakeScheduler, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("another\n")
    assert invoke("nodes", "--api-key-file", str(key_file)).exit_code == 5


def test_flags_go_before_the_environment(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTERPRODUCT_BASE_URL", "http://127.0.0.1:1")
    assert invoke("nodes").exit_code == 3
    assert invoke("nodes", "--base-url", scheduler.base_url).exit_code == 0


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTERPRODUCT_BASE_URL", raising=False)
    monkeypatch.delenv("OUTERPRODUCT_API_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_credentials")
def test_no_scheduler_configured_is_exit_code_3_and_says_what_to_start() -> None:
    result = invoke("runs")
    assert result.exit_code == 3
    assert "outerproduct up" in result.stderr


def test_what_up_has_left_is_found(scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTERPRODUCT_BASE_URL")
    monkeypatch.delenv("OUTERPRODUCT_API_KEY")
    left = tmp_path / "outerproduct" / "local.json"
    left.parent.mkdir()
    left.write_text(json.dumps({"base_url": scheduler.base_url, "api_key": KEY}))
    assert invoke("nodes").exit_code == 0


@pytest.mark.usefixtures("no_credentials")
def test_an_address_without_a_scheme_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    result = invoke("nodes", "--base-url", "localhost:50051", "--api-key-file", str(tmp_path / "key"))
    assert result.exit_code == 2
    assert "http://127.0.0.1:50051" in result.stderr


@pytest.mark.usefixtures("no_credentials")
def test_a_key_file_that_can_not_be_read_is_exit_code_2(tmp_path: Path) -> None:
    assert invoke("nodes", "--api-key-file", str(tmp_path / "none")).exit_code == 2


# --- servers, keys


@pytest.mark.parametrize(
    ("command", "extras"), [("up", "scheduler,agent"), ("scheduler", "scheduler"), ("agent", "agent")]
)
def test_a_server_whose_package_is_missing_names_the_extra(
    command: str, extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke(command)
    assert result.exit_code == 1
    assert f"pip install 'outerproduct-onprem[{extras}]'" in result.stderr


def test_keys_are_made_listed_and_revoked_in_the_schedulers_folder(tmp_path: Path) -> None:
    where = ["--data-dir", str(tmp_path)]
    made = json.loads(invoke("keys", "create", "--name", "bob", "--role", "user", "-o", "json", *where).stdout)
    assert (made["name"], made["role"]) == ("bob", "user")
    taken = invoke("keys", "create", "--name", "bob", "--role", "user", *where)
    assert taken.exit_code == 1
    assert "already" in taken.stderr
    assert invoke("keys", "revoke", "bob", *where).stdout == "bob: revoked\n"
    listed = invoke("keys", "list", *where).stdout
    assert "bob (revoked" in listed
    assert made["key"] not in listed


def test_a_key_is_not_made_in_a_folder_that_no_scheduler_has(tmp_path: Path) -> None:
    result = invoke("keys", "create", "--name", "bob", "--role", "user", "--data-dir", str(tmp_path / "typo"))
    assert result.exit_code == 2
    assert not (tmp_path / "typo").exists()


# --- the command as a whole


def test_version() -> None:
    assert invoke("--version").stdout == f"outerproduct {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_is_listed_is_there(name: str) -> None:
    context = main.make_context("outerproduct", [name], resilient_parsing=True)
    command = main.get_command(context, name)
    assert command is not None
    assert command.name == name


def test_help_documents_the_exit_codes() -> None:
    shown = invoke("--help").stdout
    assert all(f"\n    {code}" in shown for code in (0, 1, 2, 3, 4, 5, 130))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell: str) -> None:
    assert f"_OUTERPRODUCT_COMPLETE={shell}_complete" in invoke("completion", shell).stdout


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from outerproduct._cli.main import main; main(['--help'], standalone_mode=False); "
        "sys.exit(','.join({'grpc', 'rich', 'google.protobuf'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
