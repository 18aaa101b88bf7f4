"""AgentService: what an operator asks this agent on its own port. Read-only, on the loopback interface."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import outerproduct
from outerproduct.v1 import agent_service_pb2 as pb
from outerproduct.v1 import agent_service_pb2_grpc, call_pb2, resources_pb2
from outerproduct_agent.agent import Agent
from outerproduct_agent.attempt import allocation_message
from outerproduct_agent.cgroups import cgroup_version
from outerproduct_agent.cpuset import CpuSet
from outerproduct_agent.topology import Topology

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())


class AgentService(agent_service_pb2_grpc.AgentServiceServicer):
    """See proto/outerproduct/v1/agent_service.proto."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def GetNodeInfo(self, request: pb.GetNodeInfoRequest, context: Any) -> pb.NodeInfo:  # noqa: N802
        agent = self._agent
        given = agent.ledger.allocated()
        topology = agent.inventory.topology
        info = pb.NodeInfo(
            node=agent.config.node_name,
            version=outerproduct.__version__,
            boot_id=agent.inventory.boot_id,
            capacity=agent.capacity(),
            allocated=resources_pb2.MachineCapacity(
                cpus=given.cpus, memory_bytes=given.memory_bytes, accelerators=dict(given.gpus)
            ),
            cpu_ids=str(agent.ledger.cpus),
            free_cpu_ids=str(agent.ledger.free_cpus),
            numa_nodes=[
                pb.NumaNode(id=node.id, cpu_ids=str(_cpus_of(topology, node.id)), memory_bytes=node.memory_bytes)
                for node in topology.numa_nodes
            ],
            gpus=agent.gpu_messages(),
            driver_version=agent.inventory.driver_version,
            docker_version=agent.docker_version,
            cgroup_version=cgroup_version(),
            not_ready_reason=agent.not_ready_reason,
            scheduler=agent.config.scheduler,
            connected=agent.gateway.connected,
        )
        info.started_at.FromNanoseconds(int(agent.started_at * 1e9))
        return info

    async def ListAttempts(  # noqa: N802
        self, request: pb.ListLocalAttemptsRequest, context: Any
    ) -> pb.ListLocalAttemptsResponse:
        response = pb.ListLocalAttemptsResponse()
        for name, life in self._agent.lives.items():
            stored = life.stored
            entry = response.attempts.add(
                name=name,
                status=call_pb2.AttemptStatus.ValueType(life.status),
                allocation=allocation_message(stored.allocation),
                container_id=stored.container_id,
                image=stored.assign.spec.image.base,
                function=stored.assign.spec.function.qualified_name,
                detail=life.detail,
            )
            if stored.started_at:
                entry.started_at.FromNanoseconds(int(stored.started_at * 1e9))
            if life.usage is not None:
                entry.cpu_seconds = life.usage.cpu_seconds
                entry.memory_bytes = life.usage.memory_bytes
                entry.shm_bytes = life.usage.shm_bytes
        return response

    async def ListImages(self, request: pb.ListImagesRequest, context: Any) -> pb.ListImagesResponse:  # noqa: N802
        response = pb.ListImagesResponse()
        for reference, image_id, used_at in await self._agent.state.used_images():
            found = await self._agent.engine.image(image_id)
            if found is None:
                continue
            python = await self._agent.state.python_of(image_id) or {}
            entry = response.images.add(
                reference=reference,
                id=image_id,
                size_bytes=int(found.get("Size", 0)),
                python_version=python.get("version", ""),
            )
            entry.last_used_at.FromNanoseconds(int(used_at * 1e9))
        return response


async def serve(agent: Agent, listen: str) -> grpc.aio.Server:
    """The started server. Raises OSError when the port can not be opened."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(agent), server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"listen={listen} can not be opened: {error}. Choose another port.") from error
    await server.start()
    for name in ("", *SERVICES):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server


def _cpus_of(topology: Topology, node_id: int) -> CpuSet:
    return CpuSet.of(cpu.id for cpu in topology.cpus if cpu.numa_node == node_id)
