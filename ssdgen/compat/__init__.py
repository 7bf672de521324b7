"""Functions with the signatures of those that models already call, computed by the modules that ssdgen emits.

`mamba_ssm`, `vllm` and `transformers` here are named after the packages whose functions they stand in for; none is imported.
A call takes the same arguments and returns, or writes in place, the same values in the same dtypes; what cannot be done is
refused with the reason, and where a value differs from theirs the function's docstring says so.
"""
