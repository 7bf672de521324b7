"""`python -m ssdgen`: the command, where its script is not on the path."""

from ssdgen.cli import main

main()
