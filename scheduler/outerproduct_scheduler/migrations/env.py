"""How Alembic reaches the database: over the connection that `database.py` hands it."""

from alembic import context

from outerproduct_scheduler.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
