"""Layers for training: a whole mixer of a model around any recurrence."""

from ssdgen.nn.mixer import Cache as Cache
from ssdgen.nn.mixer import Mixer as Mixer
