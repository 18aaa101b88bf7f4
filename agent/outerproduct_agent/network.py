"""What containers on the agent's network may not reach beyond each other: the metadata service of a cloud machine.

It gives whoever asks over plain HTTP the machine's own credentials. The rules go into Docker's DOCKER-USER chain, which
Docker leaves alone and passes all forwarded traffic through first
(https://docs.docker.com/engine/network/packet-filtering-firewalls/). Which network that is, is left to engine.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

METADATA_ADDRESSES = ("169.254.0.0/16", "100.100.100.200/32")
"""Link-local addresses, which no router should pass on (RFC 3927, 2.7): AWS, Azure, Google, Oracle and others have
theirs at 169.254.169.254, AWS those of its container services beside it. The other one is Alibaba's."""
DNS_PORT = 53
"""Left open, since the same addresses are name servers on AWS and Google."""
SECONDS = 10.0
"""For one run of iptables, which waits for others that hold its lock."""
_BRIDGE_NAME = "com.docker.network.bridge.name"
_NETWORKS = Path("/sys/class/net")


class NotBlocked(Exception):
    """Containers may reach the metadata service."""


def bridge_of(network: dict[str, object]) -> str:
    """Name of the host's interface of a bridge network, from `docker network inspect`."""
    options = network.get("Options")
    named = options.get(_BRIDGE_NAME) if isinstance(options, dict) else None
    return str(named or f"br-{str(network['Id'])[:12]}")


def metadata_rules(bridge: str) -> list[list[str]]:
    """What iptables gets after `-I DOCKER-USER`, `-C` or `-D`: refused at once, so that programs do not wait.

    Only TCP: the metadata services speak HTTP, name servers mostly UDP.
    """
    return [
        ["-i", bridge, "-d", address, "-p", "tcp", "!", "--dport", str(DNS_PORT), "-j", "REJECT"]
        for address in METADATA_ADDRESSES
    ]


def block_metadata(bridge: str) -> None:
    """Puts the rules in place where they are missing. Blocks for some milliseconds. Raises NotBlocked."""
    if not (_NETWORKS / bridge).exists():
        raise NotBlocked(f"Docker's bridge {bridge} is not on this machine: block {METADATA_ADDRESSES} where it is")
    for rule in metadata_rules(bridge):
        if _iptables("-C", rule).returncode:
            done = _iptables("-I", rule)
            if done.returncode:
                raise NotBlocked(f"iptables: {done.stderr.strip()}. Run the agent as root, with iptables installed.")


def unblock_metadata(bridge: str) -> None:
    """Takes the rules away with their bridge; harmless where there are none. Raises NotBlocked without iptables."""
    for rule in metadata_rules(bridge):
        _iptables("-D", rule)


def _iptables(action: str, rule: list[str]) -> subprocess.CompletedProcess[str]:
    command = ["iptables", "--wait", "5", action, "DOCKER-USER", *rule]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBlocked(f"iptables can not be run: {error}. Install iptables, and run the agent as root.") from error
