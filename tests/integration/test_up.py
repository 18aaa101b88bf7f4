"""`outerproduct up`, as a newcomer uses it: it says that it is ready, the SDK finds it, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import docker
import pytest
from tests.support.stack import free_port

pytestmark = pytest.mark.docker

SCRIPT = """
import outerproduct as op
client = op.init()
image = op.Image.from_registry(%r)
print(client.run(fn=lambda: 6 * 7, image=image, memory_bytes=256 * 1024**2).wait(timeout=120))
client.run(fn=__import__("time").sleep, args=(600,), image=image, memory_bytes=256 * 1024**2)
"""


def test_up_runs_a_call_and_leaves_nothing_behind(tmp_path: Path, base_image: str) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_DATA_HOME": str(tmp_path / "data")}
    for name in ("OUTERPRODUCT_API_KEY", "OUTERPRODUCT_BASE_URL"):
        env.pop(name, None)
    command = [sys.executable, "-m", "outerproduct._cli.main", "up"]
    up = subprocess.Popen(
        [*command, "--port", str(free_port()), "--agent-port", str(free_port())],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert up.stdout is not None
        seen = []
        for line in up.stdout:
            seen.append(line)
            if line.startswith("Ready"):
                break
        else:
            pytest.fail("up ended before it was ready:\n" + "".join(seen))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT % base_image],
            env=env, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "42"
        second = subprocess.run(
            [*command, "--port", str(free_port())], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode != 0
        assert "up" in second.stderr
    finally:
        up.send_signal(signal.SIGINT)
        rest = up.communicate(timeout=120)[0]
    assert up.returncode == 0, rest
    assert not (tmp_path / "state" / "outerproduct" / "local.json").exists()
    node = os.uname().nodename
    client = docker.from_env()
    try:
        assert client.containers.list(all=True, filters={"label": f"outerproduct.node={node}"}) == []
        assert client.networks.list(names=[f"outerproduct-{node}"]) == []
    finally:
        client.close()
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
