"""Which run is which: a run's folder is named after everything that can change its numbers, and after nothing else."""

import hashlib
import json
import re
from pathlib import Path

from normflax.config import Config, flat
from normflax.data import sources
from normflax.model.placements import Depths, branch_roles, find, path_scales, role_gains

ELSEWHERE = frozenset({"name", "results", "on_exists", "fail_fast", "data.path"})
"""Settings that say where a run lands, what happens around it and where its text lies: they change none of its numbers."""

TRACED = frozenset(
    {
        *("seed", "coef.alpha", "coef.beta", "coef.gain", "coef.qk_gain", "train.label_smoothing", "train.z_loss"),
        *("model.init_std", "model.embed_std", "model.embed_scale", "model.position_std", "model.residual_scaling"),
        *("optim.rate", "optim.decay", "optim.beta1", "optim.beta2", "optim.eps", "optim.momentum", "optim.clip"),
        *("optim.memory", "optim.update_clip"),
        *("schedule.warmup_steps", "schedule.final", "schedule.decay_share", "schedule.start", "train.steps", "probe.grid"),
        *("data.seed", "data.concentration", "data.table_seed"),
    }
)
"""Settings that select no compiled program: numbers that are traced, and what only the host reads."""


def static_key(config: Config) -> str:
    """What a run compiles, as text: runs with one key share their programs."""
    apart = TRACED | ELSEWHERE - {"data.path"}  # another text is another length
    values = {key: value for key, value in flat(config).items() if key not in apart}
    return json.dumps(values, sort_keys=True)


def facts(config: Config) -> dict:
    """Everything that can change the numbers of a run.

    Beside the settings: what the placement is (its sites, scales and gains, so that an edit of a user's own placement is another
    run) and the sha256 of the data.
    """
    entry, depths = find(config.placement), Depths(decoder=config.model.depth)
    norms = {site: getattr(entry, site) for site in (*entry.sites, "embed", "final", "q", "k")}
    return {
        "settings": {key: value for key, value in flat(config).items() if key not in ELSEWHERE},
        "sites": {site: norm and (norm.kind or "") for site, norm in norms.items()},
        "skip_from": entry.skip_from,
        "base": entry.base,
        "scales": path_scales(entry, depths),
        "gains": role_gains(entry, depths, branch_roles(config.model.ffn)),
        "data": sources.load(config.data).sha256,
    }


def run_id(config: Config) -> str:
    """`<slug>-<hash>`: what a person looks for first, then 8 hex digits of the sha256 of the facts."""
    text = json.dumps(facts(config), sort_keys=True)
    return f"{slug(config)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def slug(config: Config) -> str:
    """Placement, depth, width, rate, warm-up and seed, in at most 60 characters that every file system takes."""
    how = f"rate{config.optim.rate:g}-warm{config.schedule.warmup_steps}" if config.train.steps else "initial"
    text = f"{config.placement}-{config.model.depth}x{config.model.width}-{how}-seed{config.seed}"
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)[-60:].lstrip(".+-")


def run_folder(config: Config) -> Path:
    """<results>/<name>/<run id>."""
    return Path(config.results) / config.name / run_id(config)
