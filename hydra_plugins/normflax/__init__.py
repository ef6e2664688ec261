"""normflax's plugins for Hydra. Hydra imports these files at every start of every app here: they are light, and know no jax."""
