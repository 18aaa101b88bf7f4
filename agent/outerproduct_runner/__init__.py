"""What runs inside an Attempt's container: the only place, besides the caller's process, that unpickles."""
