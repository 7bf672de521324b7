"""The command line: the only room that speaks to a person, and the only one that ends the process."""

from ssdgen.cli.main import main

__all__ = ["main"]
