"""Images from a registry (Debian's docker-registry, started here): pulled when missing, built upon with `uv`."""

from __future__ import annotations

import http.server
import ipaddress
import shutil
import subprocess
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from tests.integration.programs import inside
from tests.support.stack import Stack, free_port, running_stack

import outerproduct as op

pytestmark = [
    pytest.mark.docker,
    pytest.mark.registry,
    pytest.mark.skipif(shutil.which("docker-registry") is None, reason="docker-registry is not installed"),
]
MIB = 1024**2

CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a registry on the loopback interface, which Docker talks to without TLS."""
    folder = tmp_path_factory.mktemp("registry")
    port = free_port()
    config = folder / "config.yml"
    config.write_text(CONFIG.format(folder=folder / "data", port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def pushed(registry: str, base_image: str) -> Iterator[str]:
    """A reference that only the registry has."""
    reference = f"{registry}/team/base:v1"
    client = docker.from_env()
    try:
        client.images.get(base_image).tag(reference)
        answers = list(client.api.push(reference, stream=True, decode=True))
        assert not [answer for answer in answers if "error" in answer], answers
        client.images.remove(reference)
        yield reference
        client.images.remove(reference, force=True)
    except docker.errors.ImageNotFound:
        return
    finally:
        client.close()


def make_wheel(folder: Path) -> None:
    """A package of one module, as an index page links to it."""
    page = folder / "simple" / "tiny-answer"
    page.mkdir(parents=True)
    name = "tiny_answer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(page / name, "w") as wheel:
        wheel.writestr("tiny_answer.py", "ANSWER = 42\n")
        info = "tiny_answer-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-answer\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"tiny_answer.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    (page / "index.html").write_text(f'<a href="{name}">{name}</a>')


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a package index, at the address that containers see of this machine."""
    folder = tmp_path_factory.mktemp("index")
    make_wheel(folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)  # type: ignore[arg-type, misc]

        def log_message(self, *_: object) -> None:
            """Quiet."""

    client = docker.from_env()
    subnet = ipaddress.ip_network(client.networks.get("bridge").attrs["IPAM"]["Config"][0]["Subnet"])
    gateway = str(next(subnet.hosts()))
    client.close()
    server = http.server.ThreadingHTTPServer((gateway, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{gateway}:{server.server_port}/simple"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def building_stack(tmp_path_factory: pytest.TempPathFactory, base_image: str, index: str) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("building"), agent_args=("--package-index", index)) as running:
        yield running


def test_an_image_that_is_not_here_is_pulled(building_stack: Stack, pushed: str) -> None:
    run = building_stack.client().run(
        fn=inside.add, args=(20, 22), image=op.Image.from_registry(pushed), memory_bytes=128 * MIB
    )
    assert run.wait(timeout=200) == 42


def test_a_tag_that_the_registry_does_not_have_says_so(building_stack: Stack, registry: str) -> None:
    reference = f"{registry}/team/base:v2"
    run = building_stack.client().run(
        fn=inside.add, args=(1, 2), image=op.Image.from_registry(reference), memory_bytes=128 * MIB
    )
    with pytest.raises(op.ImageUnavailable, match="team/base:v2"):
        run.wait(timeout=120)


def test_a_layer_is_built_once_and_its_packages_are_there(building_stack: Stack, base_image: str) -> None:
    image = op.Image.from_registry(base_image).with_uv_pip_install("tiny-answer==1.0")
    client = building_stack.client()

    def answer() -> int:
        import tiny_answer  # type: ignore[import-not-found]

        return int(tiny_answer.ANSWER)

    runs = [client.run(fn=answer, image=image, memory_bytes=128 * MIB) for _ in range(2)]
    assert [run.wait(timeout=200) for run in runs] == [42, 42]


def test_a_layer_that_cannot_be_built_shows_the_end_of_the_build(building_stack: Stack, base_image: str) -> None:
    image = op.Image.from_registry(base_image).with_uv_pip_install("no-such-package-anywhere")
    run = building_stack.client().run(fn=inside.add, args=(1, 2), image=image, memory_bytes=128 * MIB)
    with pytest.raises(op.ImageBuildFailed, match="no-such-package-anywhere"):
        run.wait(timeout=200)
