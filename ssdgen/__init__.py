"""ssdgen: state space layers from a short spec file to proved, verified GPU kernels."""

__version__ = "0.1.0"
