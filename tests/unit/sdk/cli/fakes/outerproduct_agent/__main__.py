"""Leaves its mark and its arguments, and writes what happens to it into the journal.

FAKE_AGENT=deaf: it does not end when it is asked to.
"""

import json
import os
import signal
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_FOLDER"])


def journal(event: str) -> None:
    with (FOLDER / "journal").open("a") as file:
        file.write(f"{event}\n")


signal.alarm(120)  # it must not outlive a test that fails
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
journal("agent starts")
(FOLDER / "agent.arguments").write_text(json.dumps(sys.argv[1:]))
print("the agent speaks", flush=True)
(FOLDER / "agent.pid.new").write_text(str(os.getpid()))
(FOLDER / "agent.pid.new").replace(FOLDER / "agent.pid")
while True:
    journal(f"agent gets {signal.Signals(signal.sigwait({signal.SIGTERM, signal.SIGINT})).name}")
    if os.environ.get("FAKE_AGENT") != "deaf":
        break
journal("agent ends")
