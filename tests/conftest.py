"""Settings of every test, and of every process that a test starts: they must be there before jax is imported."""

import os
from importlib.metadata import version
from pathlib import Path

settings = {
    "MPLBACKEND": "Agg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",  # float32 never turns into float64 or bfloat16 unasked
    "JAX_NUMPY_RANK_PROMOTION": "raise",  # [T, D] + [D] is written as a broadcast, or is a bug
    # Many tests compile the same small programs, in several test processes and again at the next run. jax's keys
    # hold the program and the compiler's options; the folder's name holds the compiler's version.
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / f"jaxlib-{version('jaxlib')}"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
os.environ.update(settings)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of float32 on a CPU
