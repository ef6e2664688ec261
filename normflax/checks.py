"""What settings may be: every rule that a run must meet before anything is compiled or written."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normflax.model.placements import EVERY_SITE, Depths, branch_roles, find, path_scales, role_gains
from normflax.nearest import unknown


class ConfigError(ValueError):
    """A setting that can't be: one sentence, exit code 2, before anything is compiled or written."""


CHOICES = {
    "norm.kind": ("layer", "rms", "none"),
    "norm.gain_form": ("w", "1+w"),
    "model.ffn": ("relu", "gelu", "swiglu"),
    "model.positions": ("learned", "sinusoidal", "rope", "none"),
    "model.mask": ("causal", "bidirectional"),
    "model.init": (None, "xavier_normal", "xavier_uniform", "lecun", "normal", "truncated_normal"),
    "model.dtype": ("float32", "bfloat16"),
    "model.remat": ("dots", "full", "none"),
    "data.name": ("stdlib", "files", "tokens", "copy", "modk", "markov", "mixture"),
    "optim.name": ("adamw", "adam", "sgd", "lion", "adafactor", "muon"),
    "schedule.name": ("constant", "linear", "cosine", "inverse_sqrt", "wsd", "ramp", "geometric_ramp"),
    "probe.grid": ("log", "all", "none"),
    "on_exists": ("skip", "error", "overwrite"),
}
"""What the settings with a fixed list of values may be. A test holds them against the tables that implement them."""

AT_LEAST = {
    "model.depth": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.init_std": 0,
    "model.embed_std": 0,
    "model.position_std": 0,
    "data.windows": 2,
    "data.vocab": 2,
    "data.lag": 1,
    "data.order": 1,
    "train.steps": 0,
    "train.batch": 1,
    "train.tokens": 1,
    "train.accumulate": 1,
    "probe.seeds": 1,
    "train.z_loss": 0,
    "schedule.warmup_steps": 0,
    "seed": 0,
    "data.seed": 0,
    "data.table_seed": 0,
    "optim.rate": 0,
    "optim.decay": 0,
    "optim.eps": 0,
    "optim.momentum": 0,
    "optim.memory": 0,
    "optim.update_clip": 0,
    "optim.clip": 0,
    "norm.eps": 0,
}


IN_PLACE = ("copy", "modk")
"""Data whose targets are functions of the inputs, and not the next token."""


def examine(config: Any, values: Mapping[str, Any]) -> None:
    """Hold a Config to every rule; `values` are its settings by dotted key.

    Raises ConfigError with one sentence that names the key, the value, what is allowed and the nearest match.
    """
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            raise ConfigError(unknown(key, values[key], [str(a) for a in allowed if a is not None]))
    for key, least in AT_LEAST.items():
        if values[key] is not None and not least <= values[key] < float("inf"):
            raise ConfigError(
                f"{key}={values[key]} is {'too large' if values[key] == float('inf') else 'too small'}: it is at least {least}"
            )
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value} is no finite number")
        largest = 2**32 if key in ("seed", "data.seed") else 2**31
        if isinstance(value, int) and value >= largest:
            raise ConfigError(f"{key}={value} is too large: it is below 2**{largest.bit_length() - 1}")
    _check_placement(config)
    _check_model(config)
    _check_schedule(config.schedule, config.train.steps)
    if config.optim.name == "adam" and config.optim.decay:
        raise ConfigError(f"optim.decay={config.optim.decay} needs optim.name=adamw: adam has no decay")
    for key, names in {"eps": ("adam", "adamw", "adafactor", "muon"), "update_clip": ("adafactor",)}.items():
        if config.optim.name in names and not getattr(config.optim, key):
            raise ConfigError(f"optim.{key}=0.0 makes NaN of a gradient of 0 under optim.name={config.optim.name}: it is above 0")
    _check_data(config.data, config.train.tokens)
    for key in ("beta1", "beta2", "momentum"):
        if not 0 <= getattr(config.optim, key) < 1:
            raise ConfigError(f"optim.{key}={getattr(config.optim, key)} is the weight of the past in a mean: from 0 to below 1")
    parts = Path(config.name).parts
    if not parts or ".." in parts or Path(config.name).is_absolute() or max(len(part.encode()) for part in parts) > 255:
        raise ConfigError(f"name='{config.name}' is no folder below `results`: it has 1 to 255 bytes a part, and no '..'")
    _check_train(config)
    _check_probes(config.probe, config.train.steps)
    if config.seed + config.probe.seeds > 2**32:
        raise ConfigError(f"probe.seeds={config.probe.seeds} from seed={config.seed} on go beyond the last seed, 2**32 - 1")


def _check_placement(config: Any) -> None:
    """The placement exists, and its coefficients have values at this depth."""
    depths, name = Depths(decoder=config.model.depth), config.placement
    try:
        entry = find(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if entry.base is not None and entry.base not in CHOICES["model.init"]:
        raise ConfigError(f"placement '{name}': {unknown('base', entry.base, list(filter(None, CHOICES['model.init'])))}")
    for kind in {site.kind for site in map(entry.__getattribute__, EVERY_SITE) if site and site.kind}:
        if kind not in CHOICES["norm.kind"]:
            raise ConfigError(f"placement '{name}': {unknown('norm', kind, CHOICES['norm.kind'])}")
    try:
        scales = [number for table in path_scales(entry, depths) for row in table for number in row]
        gains = role_gains(entry, depths, branch_roles(config.model.ffn))
    except Exception as error:  # a user's own function may raise anything
        text = f"placement '{name}' fails at {depths.blocks} blocks: {type(error).__name__}: {error}"
        raise ConfigError(text) from None
    if not all(map(math.isfinite, [*scales, *(number for row in gains.values() for number in row)])):
        raise ConfigError(f"placement '{name}' has a scale or gain at {depths.blocks} blocks that is no finite number")


def _check_model(config: Any) -> None:
    """The parts of the model fit each other."""
    m = config.model
    if m.hidden < 1:
        raise ConfigError(f"model.ffn_ratio={m.ffn_ratio} leaves no FFN at model.width={m.width}")
    if m.width % m.heads:
        raise ConfigError(f"model.heads={m.heads} does not divide model.width={m.width}")
    if m.heads % m.groups:
        raise ConfigError(f"model.kv_heads={m.kv_heads} does not divide model.heads={m.heads}")
    if m.positions == "rope" and (m.width // m.heads) % 2:
        raise ConfigError(f"model.positions=rope turns pairs of features, and a head of {m.width // m.heads} is odd")
    for key in ("qk_norm", "embed_norm"):
        if getattr(m, key) and config.norm.kind == "none":
            raise ConfigError(f"model.{key}=true needs a norm: norm.kind=none is none")
    if not 0 <= m.dropout < 1:
        raise ConfigError(f"model.dropout={m.dropout} is the share that is dropped: from 0 to below 1")
    if m.mask == "bidirectional" and config.data.name not in IN_PLACE:
        raise ConfigError(
            f"model.mask=bidirectional shows a model of data.name={config.data.name} the token it is to predict:"
            f" it goes with {' and '.join(IN_PLACE)}"
        )


def _check_schedule(s: Any, steps: int) -> None:
    """The parts of the schedule fit into the run."""
    if steps and s.warmup_steps and s.warmup_steps >= steps:
        raise ConfigError(f"schedule.warmup_steps={s.warmup_steps} is not below train.steps={steps}: the peak is never held")
    for key in ("final", "start"):
        if not 0 <= getattr(s, key) <= 1:
            raise ConfigError(f"schedule.{key}={getattr(s, key)} is a share of the peak: from 0 to 1")
    if not 0 < s.decay_share <= 1:
        raise ConfigError(f"schedule.decay_share={s.decay_share} is a share of the steps: above 0, at most 1")
    if s.name == "wsd" and s.warmup_steps + s.decay_share * steps > steps:
        raise ConfigError(
            f"schedule.warmup_steps={s.warmup_steps} and schedule.decay_share={s.decay_share} leave no step of"
            f" train.steps={steps} between them"
        )
    if s.name in ("ramp", "geometric_ramp") and s.warmup_steps > 1:
        raise ConfigError(f"schedule.warmup_steps={s.warmup_steps} has no place in schedule.name={s.name}, which rises throughout")
    if s.name == "geometric_ramp" and s.start == 0:
        raise ConfigError("schedule.start=0 is no start of schedule.name=geometric_ramp: no factor leads away from 0")


def _check_data(d: Any, tokens: int) -> None:
    """The data is named completely, and a sequence holds a target."""
    if not 0 < d.heldout < 1:
        raise ConfigError(f"data.heldout={d.heldout} is a share of the text: between 0 and 1")
    if d.name == "mixture":
        _check_mixture(d)
    if d.vocab > 2**30:  # so that a sum of two ids is a 32-bit number too
        raise ConfigError(f"data.vocab={d.vocab} is too large: it is at most {2**30}")
    named = [tuple(part.partition(":")[::2]) for part in d.parts] if d.name == "mixture" else [(d.name, "")]
    names = {name for name, _ in named}
    for name, what in {"files": "a file, a folder or a glob", "tokens": "a .npy or .bin file of token ids"}.items():
        if (name, "") in named and not d.path:
            raise ConfigError(f"data={name} needs data.path: {what}")
    if names & {"copy", "modk"} and d.lag >= tokens:
        raise ConfigError(f"data.lag={d.lag} leaves no target in train.tokens={tokens}")
    if "markov" in names and not d.concentration > 0:
        raise ConfigError(f"data.concentration={d.concentration} is a Dirichlet parameter: above 0")
    if "markov" in names and d.order > tokens:
        raise ConfigError(f"data.order={d.order} is longer than a sequence: train.tokens={tokens}")


def _check_mixture(d: Any) -> None:
    """The parts of a mixture are sources, and each has a weight."""
    plain = [name for name in CHOICES["data.name"] if name != "mixture"]
    if len(d.parts) < 2:
        raise ConfigError(f"data.parts={d.parts} is no mixture: name at least two of {', '.join(plain)}")
    for part in d.parts:
        name, colon, _ = part.partition(":")
        if name == "mixture":
            raise ConfigError(f"data.parts={d.parts} holds 'mixture': a mixture is no part of another one")
        if name not in plain:
            raise ConfigError(unknown("data.parts", name, plain))
        if colon and name not in ("files", "tokens"):
            raise ConfigError(f"data.parts: '{part}' names a path, and '{name}' has none")
    if d.weights and (len(d.weights) != len(d.parts) or min(d.weights) < 0 or not 0 < sum(d.weights) < float("inf")):
        raise ConfigError(f"data.weights={d.weights} are no weights of {len(d.parts)} parts: one each, none negative, not all 0")


def _check_train(config: Any) -> None:
    """The batch can be taken apart, and its target softened."""
    t = config.train
    if t.batch % t.accumulate:
        raise ConfigError(f"train.accumulate={t.accumulate} does not divide train.batch={t.batch}")
    if not 0 <= t.label_smoothing < 1:
        raise ConfigError(f"train.label_smoothing={t.label_smoothing} is a share of a target's probability: from 0 to below 1")


def _check_probes(probe: Any, steps: int) -> None:
    """Every probed field exists, and is read in such a run."""
    from normflax.probes.fields import FIELDS, at_start, besides

    for key in ("fields", "every_step"):
        for name in getattr(probe, key):
            if name not in FIELDS and name not in ("core", "all"):
                raise ConfigError(unknown(f"probe.{key}", name, ["core", "all", *FIELDS]))
            if name in FIELDS and steps and FIELDS[name].when == "initial":
                raise ConfigError(f"probe.{key}={name} is read of a model that has made no update: it goes with train.steps=0")
            if name in FIELDS and not steps and name not in at_start([name]):
                raise ConfigError(f"probe.{key}={name} is read of updates: it does not go with train.steps=0")
    for name in besides(probe.every_step):
        if name in probe.every_step:
            raise ConfigError(f"probe.every_step={name} is read beside the steps, at those of probe.grid: put it into probe.fields")
    if steps and probe.seeds > 1:
        raise ConfigError(f"probe.seeds={probe.seeds} goes with train.steps=0: a run that trains has one seed")
    if not steps and not at_start(probe.fields):
        raise ConfigError("probe.fields=[] with train.steps=0 would neither train nor read anything")
