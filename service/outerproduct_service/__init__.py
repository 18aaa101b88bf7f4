"""What the scheduler and the agent share as long-running services: settings and logs.

Neither imports the other, and the SDK imports nothing of this.
"""
