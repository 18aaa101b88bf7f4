"""The node agent: owns this machine's containers, and decides which CPUs and GPUs each Attempt gets."""
