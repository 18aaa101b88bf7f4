"""Settings of the scheduler: flags over environment (OUTERPRODUCT_SCHEDULER_*) over a TOML file over defaults."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource


class SchedulerConfig(BaseSettings):
    """Every key of the file is a flag and an environment variable too; unknown keys are refused."""

    model_config = SettingsConfigDict(env_prefix="OUTERPRODUCT_SCHEDULER_", extra="forbid")

    listen: str = Field("127.0.0.1:50051", description="HOST:PORT of the gRPC server")
    data_dir: Path = Field(
        Path("/var/lib/outerproduct/scheduler"), description="folder for the database, blobs and logs"
    )
    database_url: str = Field("", description="SQLAlchemy URL; empty: SQLite in the data folder")
    tls_cert: Path | None = Field(None, description="PEM file with the server's certificate chain")
    tls_key: Path | None = Field(None, description="PEM file with its private key")
    insecure: bool = Field(False, description="serve beyond the loopback interface without TLS; keys travel readable")
    heartbeat_seconds: float = Field(5.0, gt=0, description="seconds between heartbeats of agents")
    node_lost_seconds: float = Field(
        600.0, gt=0, description="seconds without its agent until a node's Attempts are given up"
    )
    log_format: str = Field("console", pattern="^(json|console)$", description="json or console")

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{value!r} must be HOST:PORT, such as 127.0.0.1:50051")
        return value

    @model_validator(mode="after")
    def _closed_by_default(self) -> SchedulerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or none")
        if not is_loopback(self.listen) and self.tls_cert is None and not self.insecure:
            raise ValueError(
                f"listen={self.listen} is beyond the loopback interface, where API keys must not travel readable: give "
                "tls_cert and tls_key, or insecure if something else protects the network"
            )
        return self

    @property
    def url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'scheduler.sqlite3'}"

    @classmethod
    def load(cls, file: Path | None, flags: dict[str, Any]) -> SchedulerConfig:
        """Raises pydantic's ValidationError, which names the key."""

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

        loaded: SchedulerConfig = FromFile(**flags)
        return loaded


def is_loopback(address: str) -> bool:
    """Whether nobody outside this machine can reach HOST:PORT."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
