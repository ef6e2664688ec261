"""How fast it is here: every comparison is made in one run, alternating, and reported as a ratio of medians."""

from normflax.bench.report import main

__all__ = ["main"]
