"""Settings of the scheduler: flags over environment (OUTERPRODUCT_SCHEDULER_*) over a TOML file over defaults."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from outerproduct_service.settings import ServiceConfig, host_and_port, is_loopback


class SchedulerConfig(ServiceConfig):
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
        return host_and_port(value)

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
