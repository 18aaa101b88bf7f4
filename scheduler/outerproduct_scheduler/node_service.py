"""NodeService: what nodes there are, and the operator's levers."""

from __future__ import annotations

import time
from typing import Any

from outerproduct.v1 import node_service_pb2, node_service_pb2_grpc
from outerproduct_scheduler.adapters import MAX_PAGE, from_token, to_token, unary
from outerproduct_scheduler.controller import Controller
from outerproduct_scheduler.errors import InvalidArgument, NotFound
from outerproduct_scheduler.nodes import NodeState, node_messages

MAX_REASON_CHARACTERS = 1000
MAX_LABELS = 64


class NodeService(node_service_pb2_grpc.NodeServiceServicer):
    """See proto/outerproduct/v1/node_service.proto."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @unary
    async def ListNodes(  # noqa: N802
        self, request: node_service_pb2.ListNodesRequest, context: Any
    ) -> node_service_pb2.ListNodesResponse:
        found = [
            message
            for name in sorted(self._controller.nodes)
            for message in self._messages(self._controller.nodes[name])
            if request.include_unavailable or message.status.condition == node_service_pb2.NODE_CONDITION_READY
        ]
        position = from_token(request.page_token, (str,))
        rest = [message for message in found if position is None or message.name > position[0]]
        rest.sort(key=lambda message: message.name)
        limit = min(request.page_size or MAX_PAGE, MAX_PAGE)
        page = rest[:limit]
        return node_service_pb2.ListNodesResponse(
            nodes=page, next_page_token=to_token(page[-1].name) if len(rest) > limit else ""
        )

    @unary
    async def GetNode(  # noqa: N802
        self, request: node_service_pb2.GetNodeRequest, context: Any
    ) -> node_service_pb2.Node:
        node = self._controller.node(request.name.partition("/")[0])
        for message in self._messages(node):
            if message.name == request.name:
                return message
        raise NotFound(f"node {request.name!r} does not exist: see ListNodes")

    @unary
    async def CordonNode(  # noqa: N802
        self, request: node_service_pb2.CordonNodeRequest, context: Any
    ) -> node_service_pb2.Node:
        reason = _reason(request.reason) or "cordoned"
        return self._first(await self._controller.change_node(request.name, cordoned=True, reason=reason))

    @unary
    async def UncordonNode(  # noqa: N802
        self, request: node_service_pb2.UncordonNodeRequest, context: Any
    ) -> node_service_pb2.Node:
        node = await self._controller.change_node(
            request.name, cordoned=False, draining=False, drain_deadline=None, reason=""
        )
        return self._first(node)

    @unary
    async def DrainNode(  # noqa: N802
        self, request: node_service_pb2.DrainNodeRequest, context: Any
    ) -> node_service_pb2.Node:
        seconds = request.deadline_seconds
        if not 0 <= seconds < float("inf"):
            raise InvalidArgument(f"deadline_seconds={seconds} must be 0 (never) or a number of seconds")
        node = await self._controller.change_node(
            request.name,
            draining=True,
            drain_deadline=time.time() + seconds if seconds else None,
            reason=_reason(request.reason) or "draining",
        )
        return self._first(node)

    @unary
    async def SetNodeLabels(  # noqa: N802
        self, request: node_service_pb2.SetNodeLabelsRequest, context: Any
    ) -> node_service_pb2.Node:
        if len(request.labels) > MAX_LABELS:
            raise InvalidArgument(f"labels: {len(request.labels)} are more than {MAX_LABELS}")
        return self._first(await self._controller.change_node(request.name, operator_labels=dict(request.labels)))

    @unary
    async def ForgetNode(  # noqa: N802
        self, request: node_service_pb2.ForgetNodeRequest, context: Any
    ) -> node_service_pb2.ForgetNodeResponse:
        await self._controller.forget_node(request.name)
        return node_service_pb2.ForgetNodeResponse()

    def _messages(self, node: NodeState) -> list[node_service_pb2.Node]:
        used, attempts = self._controller.node_use(node.name)
        return node_messages(node, used, attempts, time.time())

    def _first(self, node: NodeState) -> node_service_pb2.Node:
        return self._messages(node)[0]


def _reason(text: str) -> str:
    if len(text) > MAX_REASON_CHARACTERS:
        raise InvalidArgument(f"reason has {len(text)} characters, more than {MAX_REASON_CHARACTERS}")
    return text
