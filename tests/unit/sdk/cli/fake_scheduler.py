"""A scheduler's services that answer the commands from what a test puts into them."""

from __future__ import annotations

from typing import Any

import grpc

from outerproduct.v1 import call_pb2, node_service_pb2, node_service_pb2_grpc, run_service_pb2, run_service_pb2_grpc

KEY = "key-of-the-test"


class FakeScheduler(node_service_pb2_grpc.NodeServiceServicer, run_service_pb2_grpc.RunServiceServicer):
    """What there is, and what was asked for."""

    def __init__(self) -> None:
        self.nodes: dict[str, node_service_pb2.Node] = {}
        self.runs: dict[str, call_pb2.Run] = {}
        self.calls: dict[str, call_pb2.Call] = {}
        self.attempts: dict[str, call_pb2.Attempt] = {}
        self.logs: dict[str, list[run_service_pb2.ReadLogsResponse]] = {}
        self.requests: list[Any] = []
        self.base_url = ""

    def _find(self, where: dict[str, Any], request: Any, name: str, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if ("authorization", f"Bearer {KEY}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is unknown or revoked")
        if name not in where:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{name} does not exist")
        return where[name]

    def ListNodes(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._find({"": None}, request, "", context)
        # One node a page.
        names = sorted(self.nodes)
        position = int(request.page_token or 0)
        more = str(position + 1) if position + 1 < len(names) else ""
        nodes = [self.nodes[name] for name in names[position : position + 1]]
        return node_service_pb2.ListNodesResponse(nodes=nodes, next_page_token=more)

    def _node(self, request: Any, context: Any) -> Any:
        return self._find(self.nodes, request, request.name, context)

    GetNode = CordonNode = UncordonNode = DrainNode = _node

    def SetNodeLabels(self, request: Any, context: Any) -> Any:  # noqa: N802
        node = self._node(request, context)
        node.labels.clear()
        node.labels.update(request.labels)
        return node

    def ListRuns(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._find({"": None}, request, "", context)
        position = int(request.page_token or 0)
        end = position + request.page_size
        more = str(end) if end < len(self.runs) else ""
        return run_service_pb2.ListRunsResponse(runs=list(self.runs.values())[position:end], next_page_token=more)

    def _run(self, request: Any, context: Any) -> Any:
        return self._find(self.runs, request, request.name, context)

    GetRun = CancelRun = _run

    def _call(self, request: Any, context: Any) -> Any:
        return self._find(self.calls, request, request.name, context)

    GetCall = CancelCall = _call

    def WaitCalls(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The Call that is waited for begins a new Attempt, and has ended."""
        call = self._find(self.calls, request, request.names[0], context)
        call.latest_attempt = f"{call.name}/attempts/{call.attempt_count + 1}"
        call.status = call_pb2.CALL_STATUS_COMPLETED
        return run_service_pb2.WaitCallsResponse(calls=[call])

    def ListCalls(self, request: Any, context: Any) -> Any:  # noqa: N802
        calls = [
            call
            for call in self.calls.values()
            if call.run == request.run and request.parent_call in {"", call.parent_call}
        ]
        return run_service_pb2.ListCallsResponse(calls=calls)

    def ListAttempts(self, request: Any, context: Any) -> Any:  # noqa: N802
        attempts = [attempt for attempt in self.attempts.values() if attempt.call == request.call]
        return run_service_pb2.ListAttemptsResponse(attempts=attempts)

    def GetAttempt(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._find(self.attempts, request, request.name, context)

    def ReadLogs(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield from self.logs.get(request.attempt, [])
