"""What signal propagation predicts for a model that has made no update: the curve of every placement, and moments of its parts."""

from normflax.theory.placement_curves import Curves, Inputs, Uncovered, curves, of_config

__all__ = ["Curves", "Inputs", "Uncovered", "curves", "of_config"]
