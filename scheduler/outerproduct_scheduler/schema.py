"""Tables. The migrations make them; nothing here is particular to SQLite."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("created_by", sa.String(128), nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("error_message", sa.Text, nullable=False),
    # Seconds since the epoch, UTC; in all tables.
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Index("runs_by_age", "created_at", "id"),
    sa.Index("runs_by_creator", "created_by", "created_at", "id"),
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("id", sa.String(255), primary_key=True),
    # Empty for the root.
    sa.Column("parent_id", sa.String(255), nullable=False),
    sa.Column("child_index", sa.Integer, nullable=False),
    # Number of the parent's Attempt that created it; 0 for the root.
    sa.Column("parent_attempt", sa.Integer, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    # The CallSpec as it was sent.
    sa.Column("spec", sa.LargeBinary, nullable=False),
    # Of function and arguments: whether a repeated parent asks for the same.
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("attempt_count", sa.Integer, nullable=False),
    # Attempts whose function may have begun.
    sa.Column("started_attempts", sa.Integer, nullable=False),
    sa.Column("failures_before_start", sa.Integer, nullable=False),
    sa.Column("error_message", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double),
    # The Outcome; present at the end.
    sa.Column("outcome", sa.LargeBinary),
    # FailureKind of a cancellation that was asked for, and what it says.
    sa.Column("cancel_kind", sa.Integer, nullable=False),
    sa.Column("cancel_message", sa.Text, nullable=False),
    sa.Index("calls_by_age", "run_id", "created_at", "id"),
    sa.Index("calls_by_parent", "run_id", "parent_id", "child_index"),
    sa.Index("calls_by_status", "status"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("run_id", sa.String(36), primary_key=True),
    sa.Column("call_id", sa.String(255), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("node", sa.String(255), nullable=False),
    # The concrete GPU type; empty without GPUs.
    sa.Column("accelerator", sa.String(128), nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("error_message", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double),
    # The Allocation that the agent reported.
    sa.Column("allocation", sa.LargeBinary),
    sa.Column("container_id", sa.String(64), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("outcome", sa.LargeBinary),
    sa.ForeignKeyConstraint(["run_id", "call_id"], ["calls.run_id", "calls.id"], ondelete="CASCADE"),
    sa.Index("attempts_by_status", "status"),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("boot_id", sa.String(64), nullable=False),
    sa.Column("agent_version", sa.String(64), nullable=False),
    # MachineCapacity of the last message that had it.
    sa.Column("capacity", sa.LargeBinary, nullable=False),
    # Labels from the agent's configuration, and those that an operator gave.
    sa.Column("agent_labels", sa.JSON, nullable=False),
    sa.Column("operator_labels", sa.JSON, nullable=False),
    sa.Column("cordoned", sa.Boolean, nullable=False),
    sa.Column("draining", sa.Boolean, nullable=False),
    sa.Column("drain_deadline", sa.Double),
    sa.Column("reason", sa.Text, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    # SHA-256 of the key, as hex digits.
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    # "user", "operator" or "agent".
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)

settings = sa.Table(
    "settings",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
