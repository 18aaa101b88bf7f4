"""`outerproduct up` as a process of its own, over a scheduler and an agent that only say what happens to them.

What a real scheduler and agent do under it is shown by the integration tests.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
END_SECONDS = 60
"""Far beyond what any of it takes on a loaded machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Up:
    """Starts `outerproduct up` in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.local_file = folder / "state" / "outerproduct" / "local.json"
        self.port, self.agent_port = free_port(), free_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outerproduct._cli.main", "up", "--data-dir", str(self.data_dir)),
                *("--port", str(self.port), "--agent-port", str(self.agent_port), *arguments),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(FAKES),
                "FAKE_FOLDER": str(self.folder),
                "XDG_STATE_HOME": str(self.folder / "state"),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A process group of its own, as a shell gives to what runs in the foreground.
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_ready(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = self.start(*arguments, **environment)
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("Ready"), first + finish(process)[1]
        return process

    def pid(self, server: str) -> int:
        return int((self.folder / f"{server}.pid").read_text())

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what was written to stderr."""
    _, stderr = process.communicate(timeout=END_SECONDS)
    return process.returncode, stderr


def wait_for_end(pid: int) -> None:
    """Of a process that is not a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], END_SECONDS)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_agent_before_the_scheduler_and_is_a_success(up: Up, number: signal.Signals) -> None:
    process = up.start_ready()
    # The terminal sends them to the whole group.
    os.killpg(process.pid, number)
    code, stderr = finish(process)
    assert code == 0, stderr
    assert up.journal()[2:] == [
        "scheduler starts",
        "agent starts",
        "agent gets SIGTERM",
        "agent ends",
        "scheduler gets SIGTERM",
    ]


def test_the_sdk_finds_address_and_key_only_while_it_runs(up: Up) -> None:
    process = up.start_ready()
    left = json.loads(up.local_file.read_text())
    assert left == {"base_url": f"http://127.0.0.1:{up.port}", "api_key": "key-of-operator"}
    assert mode(up.local_file) == 0o600
    process.terminate()
    finish(process)
    assert not up.local_file.exists()


def test_what_another_up_has_left_for_the_sdk_stays(up: Up) -> None:
    process = up.start_ready()
    up.local_file.write_text("from another data folder")
    process.terminate()
    finish(process)
    assert up.local_file.read_text() == "from another data folder"


def test_keys_are_made_once_and_are_for_their_owner_only(up: Up) -> None:
    for _ in range(2):
        process = up.start_ready()
        process.terminate()
        finish(process)
    assert [line for line in up.journal() if "key" in line] == ["key made for operator", "key made for agent"]
    assert mode(up.data_dir) == 0o700
    assert [mode(path) for path in sorted((up.data_dir / "keys").iterdir())] == [0o600, 0o600]


def test_a_key_that_was_made_but_not_stored_is_made_again(up: Up) -> None:
    (up.folder / "key-agent").touch()
    up.start_ready()
    assert (up.data_dir / "keys" / "agent").read_text() == "key-of-agent\n"


def test_keys_that_do_not_belong_to_the_database_are_named(up: Up) -> None:
    process = up.start_ready()
    process.terminate()
    finish(process)
    (up.data_dir / "keys" / "user").write_text("key-of-somebody-else")
    code, stderr = finish(up.start())
    assert code == 1
    assert f"delete the folder {up.data_dir / 'keys'}" in stderr


def test_the_agent_is_told_to_leave_nothing_behind(up: Up) -> None:
    up.start_ready("--gpus", "none", "--reserve-cpus", "2")
    arguments = json.loads((up.folder / "agent.arguments").read_text())
    assert "--stop-attempts-on-exit" in arguments
    assert arguments[arguments.index("--gpus") + 1] == "none"
    assert arguments[arguments.index("--reserve-cpus") + 1] == "2"
    assert arguments[arguments.index("--listen") + 1] == f"127.0.0.1:{up.agent_port}"


def test_when_the_agent_dies_everything_ends_with_its_last_words(up: Up) -> None:
    process = up.start_ready()
    os.kill(up.pid("agent"), signal.SIGKILL)
    code, stderr = finish(process)
    assert code == 1
    assert "the agent ended by itself (signal 9 (Killed))" in stderr
    assert "the agent speaks" in stderr
    assert up.journal()[-1] == "scheduler gets SIGTERM"
    assert not up.local_file.exists()


def test_when_the_scheduler_dies_the_agent_is_stopped(up: Up) -> None:
    process = up.start_ready()
    os.kill(up.pid("scheduler"), signal.SIGKILL)
    code, stderr = finish(process)
    assert code == 1
    assert "the scheduler ended by itself" in stderr
    assert up.journal()[-1] == "agent ends"


def test_a_scheduler_that_can_not_start_is_shown_and_no_agent_is_started(up: Up) -> None:
    code, stderr = finish(up.start(FAKE_SCHEDULER="dies"))
    assert code == 1
    assert "the database is on fire" in stderr
    assert "agent starts" not in up.journal()


def test_servers_do_not_outlive_an_up_that_was_killed(up: Up) -> None:
    process = up.start_ready()
    process.kill()
    finish(process)
    wait_for_end(up.pid("agent"))
    wait_for_end(up.pid("scheduler"))


def test_a_second_signal_kills_what_does_not_end_and_says_so(up: Up) -> None:
    process = up.start_ready(FAKE_AGENT="deaf")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "Stopping.\n"
    process.send_signal(signal.SIGINT)
    code, stderr = finish(process)
    assert code == 1
    assert "the agent did not stop in time and was killed" in stderr
    assert up.journal()[-1] == "scheduler gets SIGTERM"


def test_a_second_up_on_the_same_data_folder_is_refused(up: Up) -> None:
    first = up.start_ready()
    code, stderr = finish(up.start())
    assert code == 1
    assert f"{up.data_dir}, used by process {first.pid}" in stderr
    assert first.poll() is None


@pytest.mark.parametrize(("taken", "flag"), [("port", "--port"), ("agent_port", "--agent-port")])
def test_a_port_in_use_is_named_before_anything_starts(up: Up, taken: str, flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", getattr(up, taken)))
        listener.listen()
        code, stderr = finish(up.start())
    assert code == 1
    assert f"port {getattr(up, taken)} can not be opened" in stderr
    assert flag in stderr
    assert up.journal() == []


def test_verbose_shows_both_logs_and_without_it_they_are_in_files_only(up: Up) -> None:
    process = up.start_ready("--verbose")
    process.terminate()
    assert "agent: the agent speaks\n" in finish(process)[1]
    process = up.start_ready()
    process.terminate()
    assert "the agent speaks" not in finish(process)[1]
    assert (up.data_dir / "agent.log").read_text() == "the agent speaks\n"
    assert (up.data_dir / "agent.log.1").read_text() == "the agent speaks\n"


def test_a_data_folder_that_is_open_to_others_is_refused_and_left_as_it_is(up: Up) -> None:
    up.data_dir.mkdir(mode=0o755)
    code, stderr = finish(up.start())
    assert code == 1
    assert f"chmod 700 {up.data_dir}" in stderr
    assert mode(up.data_dir) == 0o755


def test_one_port_for_both_is_refused(up: Up) -> None:
    up.agent_port = up.port
    code, stderr = finish(up.start())
    assert code == 2
    assert "give each its own" in stderr
