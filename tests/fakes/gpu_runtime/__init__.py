"""A Docker engine that hands out GPUs on a machine that has none."""
