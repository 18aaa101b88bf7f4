"""How a service is configured: flags over environment over a TOML file over defaults, all from one class of fields."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import click
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
"""Tells systemd (RestartPreventExitStatus) that starting again will not help."""

Command = TypeVar("Command", bound=Callable[..., Any])


class ServiceConfig(BaseSettings):
    """Base of the services' settings. Subclasses set `env_prefix` and `extra="forbid"`, and describe every field."""

    @classmethod
    def load(cls, file: Path | None, flags: dict[str, Any]) -> Self:
        """The settings of this start; a flag that is `None` was not given.

        Raises:
            pydantic.ValidationError: it names the key.
            OSError: the file can not be read.
            tomllib.TOMLDecodeError: the file is not TOML.
        """

        class FromFile(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                toml = (TomlConfigSettingsSource(settings_cls, file),) if file else ()
                return (init_settings, env_settings, *toml)

        loaded: Self = FromFile(**{name: value for name, value in flags.items() if value is not None})
        return loaded


def flags_of(config: type[ServiceConfig]) -> Callable[[Command], Command]:
    """A decorator that gives a click command one flag for each field, and `--config FILE`."""

    def decorate(command: Command) -> Command:
        for name, entry in reversed(config.model_fields.items()):
            flag = f"--{name.replace('_', '-')}"
            if entry.annotation is bool:
                command = click.option(flag, is_flag=True, default=None, help=entry.description)(command)
            else:
                command = click.option(flag, default=None, help=entry.description)(command)
        return click.option(
            "--config", "config_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="TOML file"
        )(command)

    return decorate


def exit_for_configuration(error: Exception) -> NoReturn:
    """Says what is wrong with the settings, key by key, and ends the process."""
    if isinstance(error, ValidationError):
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "configuration"
            click.echo(f"error: {where}: {problem['msg']}", err=True)
    else:
        click.echo(f"error: {error}", err=True)
    sys.exit(EXIT_CONFIGURATION)


def host_and_port(value: str) -> str:
    """The address as it is. Raises ValueError when it is not HOST:PORT."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{value!r} must be HOST:PORT, such as 127.0.0.1:50051")
    return value


def is_loopback(address: str) -> bool:
    """Whether nobody outside this machine can reach HOST:PORT."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
