"""The agent's command line: `python -m outerproduct_agent`."""

from __future__ import annotations

import asyncio
import fcntl
import signal
import sys
from pathlib import Path
from typing import Any

import click
import structlog
from pydantic import ValidationError

from outerproduct_agent import agent_service
from outerproduct_agent.agent import Agent
from outerproduct_agent.config import AgentConfig
from outerproduct_agent.engine import EngineError
from outerproduct_agent.scheduler_link import SchedulerLink
from outerproduct_service import logs
from outerproduct_service.settings import EXIT_FAILED, exit_for_configuration, flags_of

log = structlog.get_logger()


@click.command()
@flags_of(AgentConfig)
def main(config_file: Path | None, **flags: Any) -> None:
    """Runs the agent until SIGTERM; containers run on, unless --stop-attempts-on-exit."""
    try:
        config = AgentConfig.load(config_file, flags)
        token = config.token()
        ca = config.tls_ca.read_bytes() if config.tls_ca else None
    except (ValidationError, OSError, ValueError) as error:
        exit_for_configuration(error)
    logs.configure(config.log_format)
    try:
        asyncio.run(_run(config, token, ca))
    except (OSError, EngineError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)


async def _run(config: AgentConfig, token: str, ca: bytes | None) -> None:
    config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (config.data_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"another agent works in data_dir={config.data_dir}: stop it, or give this one its own"
            ) from None
        link = SchedulerLink(config.scheduler, token, ca)
        agent = Agent(config, link)
        await agent.prepare()
        server = await agent_service.serve(agent, config.listen)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        log.info("agent_started", node=config.node_name, scheduler=config.scheduler, listen=config.listen)
        try:
            await agent.run(stop)
        finally:
            await server.stop(1.0)
            await agent.close()
            await link.close()
            log.info("agent_stopped")


if __name__ == "__main__":
    main()
