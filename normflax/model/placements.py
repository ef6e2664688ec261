"""The table of placements: where the norms of a sublayer sit, and what scales its two paths.

A placement is data. One sublayer, with branch F, is

    u = pre(x)    y = out(F(c·u))    x' = post(a·skip + b·y)    skip ∈ {x, u, the block's input}

where a site that is None is the identity. `embed` normalises the embedding's output, `final` the stream before the head, `q` and
`k` the queries and keys of every head before they meet.
Coefficients a, b and c are numbers or functions of (kind of branch, block counted from 1, depths); gains multiply the standard
deviation that the base initialiser gives a role. Everything else, the forward pass, the initialisation, the equation and the
diagram in the documentation, is derived from the entry. This file imports no array library, so that help, documentation
and theory can read it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from normflax.nearest import unknown

KINDS = ("attention", "ffn")
"""The branches of a decoder block, in the order in which the stream meets them."""

ATTENTION_ROLES = ("q", "k", "v", "out")
FFN_ROLES = {"relu": ("up", "down"), "gelu": ("up", "down"), "swiglu": ("up", "gate", "down")}


def branch_roles(ffn: str) -> dict[str, tuple[str, ...]]:
    """The matrices of a block by kind of branch, for an FFN of the given form."""
    return {"attention": ATTENTION_ROLES, "ffn": FFN_ROLES[ffn]}


@dataclass(frozen=True)
class Depths:
    """The architecture: blocks in each stack, and which of them is being built.

    It comes from the config and never from a built layer, so a constant that depends on depth can't read the wrong one.
    """

    encoder: int = 0
    decoder: int = 0
    stack: Literal["encoder", "decoder"] = "decoder"

    @property
    def blocks(self) -> int:
        """Blocks of the stack being built."""
        return self.encoder if self.stack == "encoder" else self.decoder

    @property
    def sublayers_per_block(self) -> int:
        """Attention and FFN, and cross-attention in a decoder that has an encoder."""
        return 3 if self.stack == "decoder" and self.encoder else 2

    @property
    def sublayers(self) -> int:
        """Sublayers of the stack being built (S)."""
        return self.sublayers_per_block * self.blocks


@dataclass(frozen=True)
class Norm:
    """A norm at a site. `kind` None takes the run's `norm.kind`; a name fixes it for this site."""

    kind: str | None = None


N = Norm()

Coefficient = float | Callable[[str, int, Depths], float]
"""A number, or a function of the branch's kind, its block (from 1) and the depths."""

SITES = ("pre", "out", "post")
EVERY_SITE = (*SITES, "embed", "final", "q", "k")


@dataclass(frozen=True)
class Placement:
    """One entry of the table: x' = post(skip·r + branch·out(F(input·pre(x)))) with r taken from `skip_from`.

    `gain` maps roles (q, k, v, out, up, gate, down) to coefficients; an entry that declares gains declares one for every role
    it is used with, so that a new role can't be forgotten in silence. `base` is the initialiser the source assumes.
    Raises ValueError for an entry with norms whose stream reaches the head unnormalised, a site that is no Norm, or a skip from
    nowhere.
    """

    pre: Norm | None = None
    out: Norm | None = None
    post: Norm | None = None
    embed: Norm | None = None
    final: Norm | None = None
    q: Norm | None = None
    k: Norm | None = None
    skip_from: Literal["x", "u", "block"] = "x"
    skip: Coefficient = 1.0
    branch: Coefficient = 1.0
    input: Coefficient = 1.0
    gain: Mapping[str, Coefficient] | None = None
    base: str | None = None
    label: str = ""
    source: str = ""

    def __post_init__(self):
        for site in EVERY_SITE:
            if not isinstance(getattr(self, site), Norm | None):
                raise ValueError(f"the placement's site '{site}' is {getattr(self, site)!r}: it is N, Norm(kind) or None")
        if self.skip_from not in ("x", "u", "block"):
            raise ValueError(unknown("the placement's skip_from", self.skip_from, ("x", "u", "block")))
        if (self.pre or self.out) and not (self.post or self.final):
            raise ValueError("a placement with norms whose last write has no 'post' needs a 'final' norm before the head")

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of one sublayer that hold a norm, in the order in which the stream meets them."""
        return tuple(site for site in SITES if getattr(self, site))


def deepnorm_alpha(kind: str, block: int, depths: Depths) -> float:
    """DeepNorm's skip scale. DeepNet, arXiv:2203.00555, figure 2, with N encoder and M decoder blocks:

    one stack (2N)^(1/4) · encoder of two 0.81 (N⁴M)^(1/16) · decoder of two (3M)^(1/4)
    """
    n, m = depths.encoder, depths.decoder
    if n and m:
        return 0.81 * (n**4 * m) ** (1 / 16) if depths.stack == "encoder" else (3 * m) ** 0.25
    return (2 * depths.blocks) ** 0.25


def deepnorm_beta(kind: str, block: int, depths: Depths) -> float:
    """DeepNorm's initial gain of value, output and FFN weights. DeepNet, arXiv:2203.00555, figure 2:

    one stack (8N)^(-1/4) · encoder of two 0.87 (N⁴M)^(-1/16) · decoder of two (12M)^(-1/4)
    """
    n, m = depths.encoder, depths.decoder
    if n and m:
        return 0.87 * (n**4 * m) ** (-1 / 16) if depths.stack == "encoder" else (12 * m) ** -0.25
    return (8 * depths.blocks) ** -0.25


def inverse_root_of_block(kind: str, block: int, depths: Depths) -> float:
    """1/√l of block l, from 1. Sun et al. 2025, arXiv:2502.05795, equation 9."""
    return block**-0.5


def inverse_root_of_sublayers(kind: str, block: int, depths: Depths) -> float:
    """1/√S of a stack of S sublayers. GPT-2: Radford et al. 2019, section 2.3."""
    return depths.sublayers**-0.5


WRITERS: tuple[str, ...] = ("v", "out", "up", "down")
"""The roles a DeepNorm-like gain applies to: those between a branch's input and the stream, gate excepted."""

RESIDUAL: tuple[str, ...] = ("out", "down")
"""The roles whose product is what a branch writes to the stream."""

READERS: tuple[str, ...] = ("q", "k", "gate")
"""The roles it leaves alone: they set where attention looks and which FFN units pass (a gain there would make it beta³)."""

PLACEMENTS: dict[str, Placement] = {
    "post": Placement(post=N, label="Post-LN", source="Vaswani et al. 2017, arXiv:1706.03762, section 3.1"),
    "pre": Placement(pre=N, final=N, label="Pre-LN", source="Xiong et al. 2020, arXiv:2002.04745, figure 1b"),
    "sandwich": Placement(
        pre=N, out=N, final=N, label="Sandwich-LN", source="Ding et al. 2021 (CogView), arXiv:2105.13290, section 2.4"
    ),
    "deepnorm": Placement(
        post=N,
        skip=deepnorm_alpha,
        gain={**dict.fromkeys(WRITERS, deepnorm_beta), **dict.fromkeys(READERS, 1.0)},
        base="xavier_normal",
        label="DeepNorm",
        source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, section 3",
    ),
    "lns": Placement(
        pre=N,
        final=N,
        input=inverse_root_of_block,
        label="LayerNorm-Scaling",
        source="Sun et al. 2025 (Curse of Depth), arXiv:2502.05795, section 4",
    ),
    "scaled_init": Placement(
        pre=N,
        final=N,
        gain={**dict.fromkeys(("q", "k", "v", "up", "gate"), 1.0), **dict.fromkeys(RESIDUAL, inverse_root_of_sublayers)},
        label="Pre-LN, scaled init",
        source="Radford et al. 2019 (GPT-2), section 2.3",
    ),
}


def find(name: str) -> Placement:
    """The entry called `name`, or the user's own under an import path `package.module:attribute`.

    Raises ValueError when there is none, naming what is allowed and the nearest match.
    """
    if ":" not in name:
        if name not in PLACEMENTS:
            own = ", or an import path package.module:name"
            sentence = unknown("placement", name, PLACEMENTS)
            head, mark, tail = sentence.partition("; did you mean")
            raise ValueError(head + own + mark + tail)
        return PLACEMENTS[name]
    module, _, attribute = name.partition(":")
    try:
        entry = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's own file may raise anything
        text = " ".join(str(error).split())
        raise ValueError(f"placement '{name}' can't be imported: {type(error).__name__}: {text}") from None
    if not isinstance(entry, Placement):
        raise ValueError(f"placement '{name}' is {type(entry).__name__}, not a normflax Placement")
    return entry


def value(coefficient: Coefficient, kind: str, block: int, depths: Depths) -> float:
    """What a coefficient is for one sublayer."""
    return float(coefficient(kind, block, depths) if callable(coefficient) else coefficient)


class Scales(NamedTuple):
    """What multiplies the paths: skip scales a, branch scales b, and scales c of what the branches read.

    Of a stack they are [L, kinds], of a block [kinds], of a sublayer one number each.
    """

    skip: Any
    branch: Any
    input: Any


def path_scales(entry: Placement, depths: Depths) -> Scales:
    """The scales of every sublayer, as lists [L][kinds]."""

    def table(coefficient: Coefficient) -> list[list[float]]:
        return [[value(coefficient, kind, block, depths) for kind in KINDS] for block in range(1, depths.blocks + 1)]

    return Scales(table(entry.skip), table(entry.branch), table(entry.input))


def role_gains(entry: Placement, depths: Depths, roles: Mapping[str, tuple[str, ...]]) -> dict[str, list[float]]:
    """The initial gain of every role in every block, as {role: [L]}, for `roles` given by kind of branch.

    Raises ValueError when the entry declares gains but none for one of the roles.
    """
    gains = {}
    for kind, names in roles.items():
        for role in names:
            if entry.gain is not None and role not in entry.gain:
                raise ValueError(f"the placement declares initial gains but none for role '{role}'; give it one (1.0 for none)")
            coefficient = 1.0 if entry.gain is None else entry.gain[role]
            gains[role] = [value(coefficient, kind, block, depths) for block in range(1, depths.blocks + 1)]
    return gains


def fitted(entry: Placement, kind: str, *, embed_norm: bool, qk_norm: bool) -> Placement:
    """The entry with the norms that a model adds to it, and without those that are none under `norm.kind` = `kind`.

    A site whose norm is none is no site: nothing is counted or read there.
    """
    if embed_norm:
        entry = replace(entry, embed=entry.embed or N)
    if qk_norm:
        entry = replace(entry, q=entry.q or N, k=entry.k or N)

    def real(site: Norm | None) -> Norm | None:
        return site if site and (site.kind or kind) != "none" else None

    return replace(entry, **{site: real(getattr(entry, site)) for site in EVERY_SITE})


def norm_count(entry: Placement, depths: Depths) -> int:
    """Norm layers in the whole model."""
    inner = (bool(entry.q) + bool(entry.k)) * depths.blocks
    return len(entry.sites) * depths.sublayers + inner + bool(entry.embed) + bool(entry.final)
