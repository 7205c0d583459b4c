"""Tensor parallelism: a target whose layers are divided among processes."""
