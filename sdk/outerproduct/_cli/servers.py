"""What the commands that start a server share, and the commands `scheduler` and `agent`.

The servers are packages of their own that the command line never imports: it starts `python -m` of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass

import click

from outerproduct._cli.errors import CommandError


@dataclass(frozen=True)
class Server:
    """A server's package and the extra that brings what it needs."""

    module: str
    extra: str
    needs: tuple[str, ...]
    """Packages of the extra whose absence tells that it was not installed."""


SCHEDULER = Server("outerproduct_scheduler", "scheduler", ("sqlalchemy", "alembic", "grpc_health"))
AGENT = Server("outerproduct_agent", "agent", ("docker", "pynvml", "grpc_health"))


def require(*servers: Server) -> None:
    """Raises CommandError that names the extra to install when a package of one of the servers is missing."""
    missing = {
        server.extra: package
        for server in servers
        for package in (server.module, *server.needs)
        if importlib.util.find_spec(package) is None
    }
    if missing:
        raise CommandError(
            f"the {' and the '.join(missing)} can not be started",
            f"the Python package {', '.join(missing.values())} is not installed for {sys.executable}",
            f"pip install 'outerproduct-onprem[{','.join(missing)}]'",
        )


def become(server: Server, arguments: tuple[str, ...]) -> None:
    """Replaces this process by the server; never returns."""
    require(server)
    os.execv(sys.executable, [sys.executable, "-m", server.module, *arguments])  # noqa: S606


PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}
"""Every flag, `--help` too, is the server's own."""


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scheduler(arguments: tuple[str, ...]) -> None:
    """Runs a scheduler; the flags are those of `python -m outerproduct_scheduler`."""
    become(SCHEDULER, arguments)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(arguments: tuple[str, ...]) -> None:
    """Runs a node agent; the flags are those of `python -m outerproduct_agent`."""
    become(AGENT, arguments)
