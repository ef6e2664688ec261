"""Every setting of a run, its type and its default: the only place that declares them, and the only one that knows OmegaConf.

Past `resolve` there is no untyped config: the rest of normflax sees these frozen dataclasses.
"""

import copy
import dataclasses
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from normflax.checks import ConfigError, examine
from normflax.nearest import nearest


@dataclass(frozen=True)
class Norm:
    """`norm.*`: what every site of the placement holds."""

    kind: str = "layer"  # layer | rms | none
    eps: float = 1e-6  # inside the root
    scale: bool = True  # learn a gain
    bias: bool = True  # learn a bias
    gain_form: str = "w"  # w | 1+w: what is stored
    gain: float = 1.0  # the initial gain


@dataclass(frozen=True)
class Coef:
    """`coef.*`: overrides of what the placement declares; null keeps the declaration."""

    alpha: float | None = None  # skip scale a of every sublayer
    beta: float | None = None  # branch scale b of every sublayer
    gain: float | None = None  # initial gain of v, out, up and down
    qk_gain: float | None = None  # initial gain of q and k; 0 starts with attention that is uniform


@dataclass(frozen=True)
class Model:
    """`model.*`: the decoder."""

    depth: int = 12  # blocks
    width: int = 64  # features of the stream
    heads: int = 4  # of attention; they divide the width
    kv_heads: int | None = None  # grouped-query attention: heads of k and v, each shared by heads/kv_heads; null: heads
    qk_norm: bool = False  # norm.kind over each head's q and k, before rope
    mask: str = "causal"  # causal | bidirectional
    ffn: str = "gelu"  # relu | gelu | swiglu
    ffn_ratio: float = 4.0  # FFN width / width
    positions: str = "learned"  # learned | sinusoidal | rope | none
    bias: bool = True  # biases of the branches
    tied: bool = False  # one matrix for embedding and head
    fused_qkv: bool = True  # store q, k, v in one array where they are equally wide
    init: str | None = None  # xavier_normal | xavier_uniform | lecun | normal | truncated_normal; null: the placement's own
    init_std: float = 0.02  # of init=normal and truncated_normal
    residual_scaling: bool = False  # GPT-2: out and down start 1/sqrt(sublayers) as large
    embed_std: float = 1.0  # of the token embeddings at the start
    embed_scale: float = 1.0  # what the token embeddings are multiplied by
    embed_norm: bool = False  # norm.kind on the embedding, whatever the placement
    position_std: float = 0.02  # of learned positions at the start
    dropout: float = 0.0  # of the embedding, the attention weights and every branch's result
    dtype: str = "float32"  # float32 | bfloat16: of the stream and the products; parameters and statistics stay float32
    remat: str = "dots"  # dots | full | none: what the backward pass computes again

    @property
    def hidden(self) -> int:
        """FFN width F."""
        return round(self.ffn_ratio * self.width)

    @property
    def groups(self) -> int:
        """Heads G of k and v."""
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class Data:
    """`data.*`: what is predicted."""

    name: str = "stdlib"  # stdlib | files | tokens | copy | modk | markov | mixture
    path: str | None = None  # files: a file, a folder or a glob; tokens: a .npy or .bin file of token ids
    parts: list[str] = field(default_factory=list)  # mixture: names of other sources
    weights: list[float] = field(default_factory=list)  # mixture: the share of sequences each part gives; empty: equal
    heldout: float = 0.1  # share of the text that is never trained on
    windows: int = 512  # held-out windows that the loss is measured on; comparisons take 2048
    vocab: int = 64  # tokens, copy, modk, markov
    lag: int = 1  # copy: the target is the token `lag` places back; modk: this token plus that one, modulo vocab
    order: int = 1  # markov: how many tokens the next one depends on
    concentration: float = 0.3  # markov: Dirichlet parameter of the rows
    table_seed: int = 0  # markov: draws the rows
    seed: int | None = None  # order of the batches; null: the run's seed


@dataclass(frozen=True)
class Optim:
    """`optim.*`: decay is decoupled and acts on matrices only."""

    name: str = "adam"  # adamw | adam | sgd | lion | adafactor | muon
    rate: float = 1e-3  # the peak
    decay: float = 0.0  # all but adam
    beta1: float = 0.9  # adam, adamw, lion; muon: of what is no branch matrix
    beta2: float = 0.98  # adam, adamw, lion; muon: of what is no branch matrix
    eps: float = 1e-8  # adam, adamw, adafactor; muon: of what is no branch matrix
    momentum: float = 0.0  # sgd, muon
    memory: float = 0.8  # adafactor: the weight of the past at update t is 1 - t^-memory
    update_clip: float = 1.0  # adafactor: largest rms of a matrix's update before the rate
    clip: float | None = None  # global gradient norm


@dataclass(frozen=True)
class Schedule:
    """`schedule.*`: linear warm-up to the peak, then the named shape."""

    name: str = "constant"  # constant | linear | cosine | inverse_sqrt | wsd | ramp | geometric_ramp
    warmup_steps: int = 0  # updates in which the rate rises to the peak
    final: float = 0.0  # linear, cosine, wsd: where the rate has fallen to after the last update, as a share of the peak
    decay_share: float = 0.2  # wsd: the share of the steps at the end in which the rate falls
    start: float = 1e-3  # ramp, geometric_ramp: the first rate, as a share of the peak that the last update has


@dataclass(frozen=True)
class Train:
    """`train.*`."""

    steps: int = 300  # updates; 0 reads the model at initialisation, and trains nothing
    batch: int = 16  # sequences
    tokens: int = 64  # per sequence
    accumulate: int = 1  # parts of a batch whose gradients are added up one after the other
    label_smoothing: float = 0.0  # share of a target's probability that is spread over the vocabulary
    z_loss: float = 0.0  # weight of mean (ln Z)² in what is minimised


@dataclass(frozen=True)
class Probe:
    """`probe.*`: which fields of normflax/probes/fields.py are recorded, and when."""

    grid: str = "log"  # log: steps 0, 1, 2, 4, …, every steps/50 and the last | all | none
    fields: list[str] = field(default_factory=lambda: ["core"])  # names of normflax/probes/fields.py, core or all
    every_step: list[str] = field(default_factory=list)  # fields recorded at every step, whatever the grid
    seeds: int = 1  # of train.steps=0: seed, seed + 1, … so many, read in one program on one batch


@dataclass(frozen=True)
class Config:
    """One run."""

    placement: str = "pre"  # a name of the table, or package.module:name
    name: str = "runs"  # the sweep: runs land in <results>/<name>/<run id>
    seed: int = 0  # draws the weights, the dropout, and the batches where data.seed is null
    norm: Norm = field(default_factory=Norm)
    coef: Coef = field(default_factory=Coef)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    probe: Probe = field(default_factory=Probe)
    results: str = "results"  # the folder that sweeps land in
    on_exists: str = "skip"  # skip | error | overwrite: what becomes of a finished run of the same settings
    fail_fast: bool = False  # a sweep stops at its first failed run


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        out |= flat(value, f"{prefix}{f.name}.") if is_dataclass(value) else {prefix + f.name: value}
    return out


KEYS = tuple(flat(Config()))
GROUPS = tuple(f.name for f in fields(Config) if f.name not in KEYS)


def check(config: Config) -> Config:
    """The config itself when it can be run. Raises ConfigError: one sentence with the key, the value and what is allowed."""
    examine(config, flat(config))
    return config


def unknown_key(key: str) -> str:
    """The sentence for a key that no setting has."""
    return f"there is no setting '{key}'{nearest(key, [*KEYS, *GROUPS])}"


# ── OmegaConf ───────────────────────────────────────────────────────────────────────────────────────────────────────


def register() -> None:
    """Tell Hydra the schema that every config is merged into and checked against."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(Config)
    _thaw(schema)
    ConfigStore.instance().store(name="schema", node=schema, provider="normflax")


def _thaw(node: Any) -> None:
    """OmegaConf makes the nodes of frozen dataclasses read-only, and then Hydra can't override them."""
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)


def resolve(composed: Any) -> Config:
    """The checked, frozen settings of what Hydra composed, less Hydra's own. Raises ConfigError."""
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    composed = copy.deepcopy(composed)
    with open_dict(composed):
        composed.pop("hydra", None)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).split("\n", 1)[0]) from None
    if not isinstance(config, Config):
        raise ConfigError(f"expected the settings of a run, got {type(config).__name__}")
    return check(config)


def mistake(error: Exception) -> str | None:
    """What Hydra or OmegaConf has against a setting, in one sentence that names its key; None for any other exception."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, ConfigError):
        return str(error)
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    cause: Any = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = " ".join(line.strip() for line in str(cause).splitlines() if line.strip())
    text = text.split(" full_key:")[0].split(" See https")[0]
    key = getattr(cause, "full_key", None)
    if key and key not in KEYS and key not in GROUPS and not str(key).startswith("hydra"):
        return unknown_key(str(key))
    return f"{key}: {text}" if key and str(key) not in text else text


def to_yaml(config: Config) -> str:
    """The settings as YAML that any reader takes with the right types (`1e-3` alone would be text to YAML 1.1)."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def change(config: Config, **settings: Any) -> Config:
    """A copy with some settings changed, by dotted key with `__` for the dot: change(c, model__depth=24)."""
    for key, value in settings.items():
        group, _, leaf = key.partition("__")
        if leaf:
            value = dataclasses.replace(getattr(config, group), **{leaf: value})
        config = dataclasses.replace(config, **{group: value})
    return config
