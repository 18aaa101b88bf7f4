"""The first schema.

A snapshot of its own: later changes of schema.py come as later migrations and leave this one alone.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("created_by", sa.String(128), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_index("runs_by_age", "runs", ["created_at", "id"])
    op.create_index("runs_by_creator", "runs", ["created_by", "created_at", "id"])
    op.create_table(
        "calls",
        sa.Column("run_id", sa.String(36), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("id", sa.String(255), primary_key=True),
        sa.Column("parent_id", sa.String(255), nullable=False),
        sa.Column("child_index", sa.Integer, nullable=False),
        sa.Column("parent_attempt", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("attempt_count", sa.Integer, nullable=False),
        sa.Column("started_attempts", sa.Integer, nullable=False),
        sa.Column("failures_before_start", sa.Integer, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("outcome", sa.LargeBinary),
        sa.Column("cancel_kind", sa.Integer, nullable=False),
        sa.Column("cancel_message", sa.Text, nullable=False),
    )
    op.create_index("calls_by_age", "calls", ["run_id", "created_at", "id"])
    op.create_index("calls_by_parent", "calls", ["run_id", "parent_id", "child_index"])
    op.create_index("calls_by_status", "calls", ["status"])
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.String(36), primary_key=True),
        sa.Column("call_id", sa.String(255), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("accelerator", sa.String(128), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("allocation", sa.LargeBinary),
        sa.Column("container_id", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("outcome", sa.LargeBinary),
        sa.ForeignKeyConstraint(["run_id", "call_id"], ["calls.run_id", "calls.id"], ondelete="CASCADE"),
    )
    op.create_index("attempts_by_status", "attempts", ["status"])
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("boot_id", sa.String(64), nullable=False),
        sa.Column("agent_version", sa.String(64), nullable=False),
        sa.Column("capacity", sa.LargeBinary, nullable=False),
        sa.Column("agent_labels", sa.JSON, nullable=False),
        sa.Column("operator_labels", sa.JSON, nullable=False),
        sa.Column("cordoned", sa.Boolean, nullable=False),
        sa.Column("draining", sa.Boolean, nullable=False),
        sa.Column("drain_deadline", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "settings",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def downgrade() -> None:
    for table in ("settings", "api_keys", "nodes", "attempts", "calls", "runs"):
        op.drop_table(table)
