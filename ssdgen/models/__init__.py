"""Whole language models on the generated kernels: configuration, checkpoints, prefill, decoding on the device."""
