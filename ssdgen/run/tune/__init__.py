"""Finding the fastest configuration of a spec for a shape, and keeping it where the emitted modules find it."""

from ssdgen.run.tune.tune import Preview, Tuned, preview, tune

__all__ = ["Preview", "Tuned", "preview", "tune"]
