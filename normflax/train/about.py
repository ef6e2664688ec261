"""What a run's record says of its data, its placement and its machine, whatever the run does."""

from typing import Any

import jax

from normflax.build import Static
from normflax.config import Config
from normflax.data.batches import Loaded
from normflax.model.equations import equation
from normflax.model.placements import Depths, norm_count


def about(config: Config, static: Static, loaded: Loaded) -> dict[str, Any]:
    """Fields of status.json."""
    return {
        "data": {"name": loaded.name, "sha256": loaded.sha256},
        "placement": {
            "name": config.placement,
            "equation": equation(static.entry),
            "base_init": static.base,
            "norms": norm_count(static.entry, Depths(decoder=config.model.depth)),
        },
        "device": str(jax.devices()[0].device_kind),
    }
