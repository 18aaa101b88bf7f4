"""Which Runs an identity may see: users their own, operators all, an Attempt its own Run."""

from __future__ import annotations

from outerproduct_scheduler import names
from outerproduct_scheduler.auth import Identity, Role
from outerproduct_scheduler.errors import NotFound
from outerproduct_scheduler.store import CallRecord


def check_access(identity: Identity, record: CallRecord) -> None:
    """Raises NotFound for what is somebody else's, as for what does not exist: its existence is nobody's business."""
    if not may_see(identity, record.key.run_id, record.created_by):
        raise NotFound(f"{record.key.name} does not exist")


def may_see(identity: Identity, run_id: str, created_by: str) -> bool:
    if identity.role is Role.OPERATOR:
        return True
    if identity.role is Role.ATTEMPT:
        return names.parse_attempt(identity.name)[0].run_id == run_id
    return identity.name == created_by
