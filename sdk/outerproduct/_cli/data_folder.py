"""The data folder of `outerproduct up`: whose it is, who uses it now, and the keys in it.

lock          held by everything that uses the folder
keys/         user, agent: the keys that `up` made
scheduler/    the scheduler's: database, blobs, logs of Attempts
agent/        the agent's
*.log         what the two wrote since their start; *.log.1 since the start before
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outerproduct._cli.errors import CommandError
from outerproduct._cli.servers import SCHEDULER
from outerproduct._cli.supervisor import describe_exit

KEY_SECONDS = 60.0
"""How long making a key may take: it creates the database at the first start."""


def default_data_dir() -> Path:
    """${XDG_DATA_HOME:-~/.local/share}/outerproduct"""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "outerproduct"


def scheduler_dir(data_dir: Path) -> Path:
    """The scheduler's own folder."""
    return data_dir / "scheduler"


def key_file(data_dir: Path, owner: str) -> Path:
    """Where the key of "user" or "agent" is."""
    return data_dir / "keys" / owner


def make_private(folder: Path) -> None:
    """Makes the folder for its owner only: keys and results are nobody else's business. One that is there already, and
    open to others, is refused and not changed, since it may be theirs as well."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise CommandError(
            "the data folder can not be made", str(error), "choose another one with --data-dir"
        ) from error
    if mode & 0o077:
        raise CommandError(
            "the data folder is open to other users",
            f"{folder} has mode {mode:04o}",
            f"chmod 700 {shlex.quote(str(folder))}, or choose another one with --data-dir",
        )


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[int]:
    """Holds the folder's lock; gives its file descriptor, to be inherited by all that use the folder."""
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip()
            raise CommandError(
                "another `outerproduct up` uses this data folder, or has not stopped completely yet",
                f"{data_dir}, used by process {holder}",
                "use the one that runs, stop it, or give this one another --data-dir, --port and --agent-port",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def user_name() -> str:
    """Who runs this, as the name of a key."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # Neither an entry in the password file nor a variable, as in many containers.
        return f"uid-{os.getuid()}"


def key_of(data_dir: Path, owner: str, name: str, role: str) -> str:
    """The key of "user" or "agent" in the data folder; made by the scheduler's own command at the first start."""
    path = key_file(data_dir, owner)
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    create = ("create", "--name", name, "--role", role)
    made = _keys_command(data_dir, *create)
    # A start that was killed before it stored the key has left one that nobody knows.
    if made.returncode != 0 and _keys_command(data_dir, "revoke", name).returncode == 0:
        made = _keys_command(data_dir, *create)
    if made.returncode != 0:
        raise CommandError(
            f"the key of the {owner} can not be made in {scheduler_dir(data_dir)}",
            made.stderr.strip() or describe_exit(made.returncode),
            "remove the cause, or start with an empty --data-dir",
        )
    key = made.stdout.strip()
    write_private(path, f"{key}\n")
    return key


def _keys_command(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", SCHEDULER.module, "keys", *arguments, "--data-dir", str(scheduler_dir(data_dir))]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=KEY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"making a key took more than {KEY_SECONDS:.0f} seconds",
            shlex.join(command),
            f"see whether the disk of {scheduler_dir(data_dir)} answers, and start `outerproduct up` again",
        ) from None
