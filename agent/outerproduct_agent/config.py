"""Settings of the agent: flags over environment (OUTERPRODUCT_AGENT_*) over a TOML file over defaults."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from outerproduct_service.settings import ServiceConfig, host_and_port, is_loopback


class AgentConfig(ServiceConfig):
    """Every key of the file is a flag and an environment variable too; unknown keys are refused."""

    model_config = SettingsConfigDict(env_prefix="OUTERPRODUCT_AGENT_", extra="forbid")

    scheduler: str = Field("127.0.0.1:50051", description="HOST:PORT of the scheduler")
    listen: str = Field("127.0.0.1:50052", description="HOST:PORT of the operator's gRPC server")
    node_name: str = Field(default_factory=socket.gethostname, description="name of this node; by default the host's")
    data_dir: Path = Field(Path("/var/lib/outerproduct/agent"), description="folder for state, sockets and caches")
    token_file: Path | None = Field(None, description="file with the agent's key")
    tls_ca: Path | None = Field(None, description="PEM file to check the scheduler's certificate with; switches TLS on")
    insecure: bool = Field(False, description="reach a scheduler beyond the loopback interface without TLS")
    docker_host: str = Field("", description="URL of the Docker engine; empty: DOCKER_HOST, else the local socket")
    gpus: str = Field("all", description="all, none, or UUIDs of the GPUs to offer, separated by commas")
    reserve_cpus: int | None = Field(None, ge=0, description="logical CPUs that are left to the system")
    reserve_memory_bytes: int | None = Field(None, ge=0, description="bytes of memory that are left to the system")
    registry_auth_file: Path | None = Field(None, description="config.json of Docker with credentials of registries")
    ca_bundle: Path | None = Field(None, description="extra CA certificates (PEM) for builds of image layers")
    package_index: str = Field("", description="package index for builds of image layers; empty: uv's default")
    stop_attempts_on_exit: bool = Field(False, description="at the end stop all Attempts and leave nothing behind")
    log_format: str = Field("console", pattern="^(json|console)$", description="json or console")

    @field_validator("listen", "scheduler")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        return host_and_port(value)

    @field_validator("node_name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not 1 <= len(value) <= 200 or "/" in value or not value.isprintable():
            raise ValueError(f'{value!r} must be 1 to 200 printable characters without "/"')
        return value

    @model_validator(mode="after")
    def _closed_by_default(self) -> AgentConfig:
        if not is_loopback(self.listen) and not self.insecure:
            raise ValueError(
                f"listen={self.listen} is beyond the loopback interface, and this port has no TLS: use "
                "127.0.0.1, or insecure if something else protects the network"
            )
        if not is_loopback(self.scheduler) and self.tls_ca is None and not self.insecure:
            raise ValueError(
                f"scheduler={self.scheduler} is beyond the loopback interface, where keys must not travel "
                "readable: give tls_ca, or insecure if something else protects the network"
            )
        return self

    def token(self) -> str:
        """The agent's key. Raises OSError or ValueError."""
        if self.token_file is None:
            raise ValueError(
                "token_file is missing: make a key with `outerproduct keys create --role agent`, and name "
                "the file that holds it"
            )
        return self.token_file.read_text().strip()
