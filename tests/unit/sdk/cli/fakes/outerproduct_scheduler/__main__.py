"""Makes keys, serves health and ListNodes, and writes what happens to it into the journal.

The node is READY as soon as the fake agent has left its mark. FAKE_SCHEDULER=dies: it ends at once, with a last word.
"""

import os
import signal
import sys
from concurrent import futures
from pathlib import Path

FOLDER = Path(os.environ["FAKE_FOLDER"])


def journal(event: str) -> None:
    with (FOLDER / "journal").open("a") as file:
        file.write(f"{event}\n")


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def keys() -> None:
    taken = FOLDER / f"key-{option('--name') if sys.argv[2] == 'create' else sys.argv[3]}"
    if sys.argv[2] == "revoke":
        taken.unlink()
        return
    if taken.exists():
        sys.exit("there is a key with the name already")
    taken.touch()
    journal(f"key made for {option('--role')}")
    print(f"key-of-{option('--role')}")


def serve() -> object:
    """The server, which ends when nobody holds it."""
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from outerproduct.v1 import node_service_pb2, node_service_pb2_grpc, resources_pb2

    class Nodes(node_service_pb2_grpc.NodeServiceServicer):
        def ListNodes(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
            if ("authorization", "Bearer key-of-operator") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is unknown")
            if not (FOLDER / "agent.pid").exists():
                return node_service_pb2.ListNodesResponse()
            status = node_service_pb2.NodeStatus(condition=node_service_pb2.NODE_CONDITION_READY)
            total = resources_pb2.ComputeResources(cpus=7, memory_bytes=3 * 1024**3)
            node = node_service_pb2.Node(name="box", total_resources=total, status=status)
            return node_service_pb2.ListNodesResponse(nodes=[node])

    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(Nodes(), server)
    server.add_insecure_port(option("--listen"))
    server.start()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    return server


if sys.argv[1] == "keys":
    keys()
elif os.environ.get("FAKE_SCHEDULER") == "dies":
    sys.exit("the database is on fire")
else:
    signal.alarm(120)  # it must not outlive a test that fails
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    journal("scheduler starts")
    # Of an earlier start.
    (FOLDER / "agent.pid").unlink(missing_ok=True)
    (FOLDER / "scheduler.pid").write_text(str(os.getpid()))
    server = serve()
    journal(f"scheduler gets {signal.Signals(signal.sigwait({signal.SIGTERM, signal.SIGINT})).name}")
    os._exit(0)
