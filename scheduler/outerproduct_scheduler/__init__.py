"""The control plane: owns Runs, Calls and Attempts, and decides which node each Attempt goes to."""
