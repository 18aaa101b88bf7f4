"""What `grpcurl` does: a client that knows nothing but reflection finds the services and calls them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.stack import Stack

pytestmark = pytest.mark.docker


class ReflectionClient:
    """Learns everything from the server."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def _ask(self, **request: Any) -> Any:
        stub = reflection_pb2_grpc.ServerReflectionStub(self._channel)
        message = reflection_pb2.ServerReflectionRequest(**request)
        return next(iter(stub.ServerReflectionInfo(iter([message]), timeout=10)))

    def services(self) -> set[str]:
        return {service.name for service in self._ask(list_services="").list_services_response.service}

    def _learn(self, **request: Any) -> None:
        for raw in self._ask(**request).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name in self._known:
                continue
            self._known.add(file.name)
            for dependency in file.dependency:
                self._learn(file_by_filename=dependency)
            self._pool.Add(file)

    def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        service_name, _, method_name = method.rpartition("/")
        self._learn(file_containing_symbol=service_name)
        descriptor = self._pool.FindServiceByName(service_name).methods_by_name[method_name]
        request_class = message_factory.GetMessageClass(descriptor.input_type)
        answer_class = message_factory.GetMessageClass(descriptor.output_type)
        invoke = self._channel.unary_unary(
            f"/{service_name}/{method_name}",
            request_serializer=lambda value: value.SerializeToString(),
            response_deserializer=answer_class.FromString,
        )
        answer = invoke(json_format.ParseDict(request, request_class()), metadata=self._metadata, timeout=10)
        return json_format.MessageToDict(answer)


def test_the_scheduler_lists_its_services_and_answers_list_nodes(stack: Stack) -> None:
    with stack.channel() as channel:
        client = ReflectionClient(channel, stack.metadata)
        assert {
            "outerproduct.v1.RunService",
            "outerproduct.v1.NodeService",
            "outerproduct.v1.BlobService",
            "outerproduct.v1.AgentGateway",
            "grpc.health.v1.Health",
        } <= client.services()
        [node] = client.call("outerproduct.v1.NodeService/ListNodes", {})["nodes"]
    assert node["name"] == "box"
    assert node["status"]["condition"] == "NODE_CONDITION_READY"
    assert node["totalResources"]["cpus"] >= 1


def test_the_agent_answers_what_it_has(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.agent_ports['box']}") as channel:
        client = ReflectionClient(channel, ())
        assert "outerproduct.v1.AgentService" in client.services()
        info = client.call("outerproduct.v1.AgentService/GetNodeInfo", {})
        assert client.call("outerproduct.v1.AgentService/ListAttempts", {}) == {}
    assert info["node"] == "box"
    assert info["connected"] is True
    assert info["cpuIds"] == info["freeCpuIds"]
    assert info["cgroupVersion"] in {1, 2}


def test_health_is_served_without_a_key(stack: Stack) -> None:
    for address, service in (
        (stack.address, "outerproduct.v1.RunService"),
        (f"127.0.0.1:{stack.agent_ports['box']}", "outerproduct.v1.AgentService"),
    ):
        with grpc.insecure_channel(address) as channel:
            for name in ("", service):
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=name), timeout=10
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
