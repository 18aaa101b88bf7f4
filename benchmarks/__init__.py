"""Programs that measure; every figure in the documentation comes from one of them."""
