"""Ahead-of-time compiles of emitted modules, without a GPU, and what the compiled kernels use."""
