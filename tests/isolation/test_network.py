"""The rules that keep containers from a cloud's metadata service come, stay and go with the agent's network."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator

import pytest

from outerproduct_agent.engine import Engine
from outerproduct_agent.network import NotBlocked, block_metadata, bridge_of, metadata_rules

NAME = f"outerproduct-rules-{os.getpid()}"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(None)
    yield engine
    await engine.remove_network(NAME)
    engine.close()


def iptables(*arguments: str) -> list[str]:
    done = subprocess.run(["iptables", "--wait", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


async def bridge() -> str:
    command = ["docker", "network", "inspect", "--format", "br-{{slice .Id 0 12}}", NAME]
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)
    return str(done.stdout.strip())


async def rules_of(name: str) -> list[str]:
    return [rule for rule in await asyncio.to_thread(iptables, "-S", "DOCKER-USER") if f" {name} " in rule]


@pytest.mark.docker
async def test_a_new_network_is_cut_off_from_metadata(engine: Engine) -> None:
    await engine.ensure_network(NAME)
    assert len(await rules_of(await bridge())) == len(metadata_rules("any"))


@pytest.mark.docker
async def test_looking_again_adds_nothing(engine: Engine) -> None:
    await engine.ensure_network(NAME)
    before = await rules_of(await bridge())
    await engine.ensure_network(NAME)
    assert await rules_of(await bridge()) == before


@pytest.mark.docker
async def test_rules_that_somebody_flushed_come_back(engine: Engine) -> None:
    await engine.ensure_network(NAME)
    name = await bridge()
    await asyncio.to_thread(iptables, "-D", "DOCKER-USER", *metadata_rules(name)[0])
    await engine.ensure_network(NAME)
    assert len(await rules_of(name)) == len(metadata_rules(name))


@pytest.mark.docker
async def test_the_rules_go_with_the_network(engine: Engine) -> None:
    await engine.ensure_network(NAME)
    name = await bridge()
    await engine.remove_network(NAME)
    assert await rules_of(name) == []


def test_a_bridge_on_another_machine_can_not_be_cut_off() -> None:
    with pytest.raises(NotBlocked, match="br-absent"):
        block_metadata("br-absent")


def test_without_iptables_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotBlocked, match="Install iptables"):
        block_metadata("lo")


@pytest.mark.parametrize("options", [None, {}, {"com.docker.network.bridge.enable_icc": "false"}])
def test_a_bridge_is_named_for_its_network(options: object) -> None:
    assert bridge_of({"Id": "0123456789abcdef", "Options": options}) == "br-0123456789ab"


def test_a_bridge_that_was_given_a_name_has_it() -> None:
    assert bridge_of({"Id": "0123", "Options": {"com.docker.network.bridge.name": "calls0"}}) == "calls0"


def test_only_http_is_cut_off_and_name_servers_stay() -> None:
    for rule in metadata_rules("br-0"):
        assert rule[rule.index("-p") + 1] == "tcp"
        assert rule[rule.index("--dport") - 1 : rule.index("--dport") + 2] == ["!", "--dport", "53"]
