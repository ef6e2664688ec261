"""The numbers of a placement in one run: what its entry declares, with what `coef.*` and `model.*` put in their place.

No array library: the compiled model and the theory read the same numbers.
"""

from normflax.config import Config
from normflax.model.placements import (
    RESIDUAL,
    WRITERS,
    Depths,
    Placement,
    Scales,
    branch_roles,
    fitted,
    path_scales,
    role_gains,
)


def fitted_entry(config: Config, entry: Placement) -> Placement:
    """The entry with the norms that this run has."""
    m = config.model
    return fitted(entry, config.norm.kind, embed_norm=m.embed_norm, qk_norm=m.qk_norm)


def base_of(config: Config, entry: Placement) -> str:
    """The base initialiser in use: the config's, else the placement's, else Xavier-normal."""
    return config.model.init or entry.base or "xavier_normal"


def scales_of(config: Config, entry: Placement) -> Scales:
    """The scales of every path, as lists [L][kinds]. `coef.alpha` replaces every skip scale, `coef.beta` every branch scale."""
    scales, c = path_scales(entry, Depths(decoder=config.model.depth)), config.coef

    def all_of(table: list[list[float]], value: float | None) -> list[list[float]]:
        return table if value is None else [[value] * len(row) for row in table]

    return Scales(all_of(scales.skip, c.alpha), all_of(scales.branch, c.beta), scales.input)


def gains_of(config: Config, entry: Placement) -> dict[str, list[float]]:
    """The initial gain of every role, as {role: [L]}.

    `coef.gain` replaces those of v, out, up and down, `coef.qk_gain` those of q and k; `model.residual_scaling` divides out and
    down by √S.
    """
    depths, c = Depths(decoder=config.model.depth), config.coef
    gains = role_gains(entry, depths, branch_roles(config.model.ffn))
    if c.gain is not None:
        gains |= {role: [c.gain] * depths.blocks for role in WRITERS}
    if c.qk_gain is not None:
        gains |= {role: [c.qk_gain] * depths.blocks for role in "qk"}
    if config.model.residual_scaling:
        gains |= {role: [gain * depths.sublayers**-0.5 for gain in gains[role]] for role in RESIDUAL}
    return gains
