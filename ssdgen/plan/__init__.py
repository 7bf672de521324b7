"""ChunkForm and Config -> Plan: kernels as lists of loads, products and stores over named-axis tiles."""

from ssdgen.plan.builder import Unsupported
from ssdgen.plan.config import default_config
from ssdgen.plan.plans import plan

__all__ = ["Unsupported", "default_config", "plan"]
