"""The model: norms, placements, and the stack they are plugged into. The only package that imports flax."""
