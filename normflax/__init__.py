"""normflax: a laboratory for the placement of normalization in deep Transformers."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normflax import theory
    from normflax.records.table import load_table

__version__ = "0.1.0"
__all__ = ["__version__", "load_table", "theory"]


def __getattr__(name: str):
    """Import what needs pandas only when it is asked for: `normflax --help` answers before anything heavy loads."""
    if name == "theory":
        return importlib.import_module("normflax.theory")
    if name == "load_table":
        from normflax.records.table import load_table

        return load_table
    raise AttributeError(f"module 'normflax' has no attribute {name!r}")
