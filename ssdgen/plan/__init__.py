"""ChunkForm and Config -> Plan: kernels as lists of loads, products and stores over named-axis tiles."""

from ssdgen.plan.builder import Unsupported
from ssdgen.plan.config import default_config
from ssdgen.plan.plans import plan
from ssdgen.plan.settings import configure, variant
from ssdgen.plan.space import SpaceKnob, knob_space

__all__ = ["SpaceKnob", "Unsupported", "configure", "default_config", "knob_space", "plan", "variant"]
