"""Stands where an emitted package's `__init__` does; the build must not run it."""

raise ImportError("the build imported the whole package")
