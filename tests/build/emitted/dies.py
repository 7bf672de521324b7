"""A module that takes its process with it."""

import os
import sys

print("about to die", file=sys.stderr, flush=True)
os._exit(3)
