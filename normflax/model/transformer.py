"""The decoder-only Transformer: embedding, stack, final norm, head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Key, Logits, Scalar, Stream, Tokens
from normflax.model import init, norms, stack
from normflax.model.block import Block, settled
from normflax.model.dropout import Dropout, dropped
from normflax.model.placements import Norm, Placement, Scales
from normflax.probes.observer import Observer


class PathScales(NamedTuple):
    """What multiplies the paths of a model: the token embeddings [] and the stack's paths [L, kinds]."""

    embed: Scalar
    stack: Scales


class Transformer(nnx.Module):
    """Tokens [B, T] -> logits [B, T, V].

        x_0 = embed(c·E[token] + P[position])    x_S = stack(x_0)    logits = final(x_S) W_head

    Embeddings are Normal(0, embed_std²), learned positions Normal(0, position_std²), sinusoidal ones fixed. Logits have unit
    variance at initialisation: an untied head has standard deviation D^-1/2; a tied one is the embedding, and its logits are
    multiplied by D^-1/2 (unit variance for embed_std 1). `gains` [L] per role and the standard deviations may be traced.
    Parameters are float32; the stream and the products with weights are of `model.dtype`, logits float32.
    """

    def __init__(
        self,
        key: Key,
        gains: dict[str, Float[Array, "L"]],
        std: dict[str, Float[Array, ""]],
        *,
        placement: Placement,
        model,
        norm,
        base: str,
        vocab: int,
        tokens: int,
    ):
        options = {"eps": norm.eps, "scale": norm.scale, "bias": norm.bias, "gain_form": norm.gain_form, "gain": norm.gain}

        def make_norm(site: Norm | None, width: int = model.width) -> nnx.Module:
            return norms.Identity() if site is None else norms.make(site.kind or norm.kind, width, **options)

        def normal(name: str, *shape: int):
            return jax.random.normal(init.named(key, name), shape, jnp.float32)

        self.sites, self.remat, self.positions, self.dtype = placement.sites, model.remat, model.positions, model.dtype
        self.has_embed, self.has_final = placement.embed is not None, placement.final is not None
        self.token_table = nnx.Param(std["embed"] * normal("embed", vocab, model.width), role="embed")
        learned = model.positions == "learned"
        self.position_table = (
            nnx.Param(std["position"] * normal("position", tokens, model.width), role="position") if learned else None
        )
        self.embed_norm = make_norm(placement.embed)
        self.blocks = stack.stacked(
            jax.random.split(init.named(key, "blocks"), model.depth),
            gains,
            lambda key, gains: Block(key, gains, std["weight"], placement=placement, model=model, base=base, make_norm=make_norm),
        )
        self.final_norm = make_norm(placement.final)
        self.head = None if model.tied else nnx.Param(model.width**-0.5 * normal("head", model.width, vocab), role="head")

    def __call__(
        self,
        tokens: Tokens,
        scales: PathScales,
        *,
        observer: Observer | None = None,
        slots: Float[Array, "states"] | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Logits, dict]:
        """Logits, and by field what the observer saw (nothing without one): states [S + 1], sublayers [S], norms by site,
        attention [L], and of the logits.

        `slots` [S + 1] receive the squared gradients of the states in their own gradients.
        """
        embedded = self.embed(tokens, scales.embed)
        x = settled(self.embed_norm(embedded)) if self.has_embed else embedded
        x = x if dropout is None else settled(dropped(x, dropout, "embed"))
        shared = {"sites": self.sites, "remat": self.remat, "dropout": dropout and dropout.at("blocks")}
        if observer is None or slots is None:
            x, _ = stack.run(self.blocks, x, scales.stack, **shared)
            return settled(self.logits(self.readout(x))), {}
        x, first = observer.state(x, slots[0])
        inner = slots[1:].reshape(scales.stack.skip.shape)
        x, seen = stack.run(self.blocks, x, scales.stack, observer=observer, slots=inner, **shared)
        seen |= {field: jnp.concatenate([first[field][None], seen[field]]) for field in first}
        if "norm_input" in seen:
            seen["norm_input"] |= {"embed": observer.norm(embedded)} if self.has_embed else {}
            seen["norm_input"] |= {"final": observer.norm(x)} if self.has_final else {}
        logits = settled(self.logits(self.readout(x)))
        return logits, seen | observer.logits(logits)

    def embed(self, tokens: Tokens, scale: Scalar) -> Stream:
        """c·E[token], plus what the position adds, in the dtype of the stream."""
        x = scale * self.token_table[...][tokens]
        if self.position_table is not None:
            x = x + self.position_table[...][None, : tokens.shape[1]]
        if self.positions == "sinusoidal":
            x = x + sinusoids(tokens.shape[1], x.shape[-1])[None]
        return settled(x.astype(self.dtype))

    def readout(self, x: Stream) -> Stream:
        """What the head reads: the last state, through the final norm where there is one."""
        return self.final_norm(x)

    def logits(self, h: Stream) -> Logits:
        """The head's products with h, summed in float32."""
        head = h.shape[-1] ** -0.5 * self.token_table[...].T if self.head is None else self.head[...]
        flat = jnp.matmul(h.reshape(-1, h.shape[-1]), head.astype(h.dtype), preferred_element_type=jnp.float32)
        return flat.reshape(*h.shape[:-1], -1)

    def entries(self, tokens: Tokens, scales: PathScales) -> tuple[Float[Array, "states B T D"], Stream]:
        """What every block is given and, last, the stream before the final norm [L + 1, B, T, D]; and what the head reads."""
        x = self.embed_norm(self.embed(tokens, scales.embed))
        x, inputs = stack.entries(self.blocks, x, scales.stack)
        return jnp.concatenate([inputs, x[None]]), self.readout(x)


def sinusoids(tokens: int, width: int) -> Float[Array, "T D"]:
    """Fixed positions: sin(t·10000^(-2i/D)) in feature 2i and the cosine in feature 2i + 1, float32.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    frequency = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequency[None, :]
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(tokens, -1)[:, :width]


def matrices(params: nnx.State) -> dict[str, Float[Array, "L I O"]]:
    """The branch matrices of every block by role, q, k and v apart however they are stored.

    `params` are a Transformer's parameters or anything of the same structure: gradients, updates.
    """
    found = {}
    for branch in (params["blocks"]["attention"]["branch"], params["blocks"]["ffn"]["branch"]):
        for variable in jax.tree.leaves(branch, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
            role, value = variable.role, variable[...]
            if role == "qkv":
                found |= {name: value[:, :, i] for i, name in enumerate("qkv")}
            elif role not in ("bias", "gain"):
                found[role] = value
    return found


def roles(params: nnx.State) -> nnx.State:
    """The role of every parameter, in the structure of the parameters: q, k, v, qkv, out, up, gate, down, embed, position, head,
    gain or bias."""
    return jax.tree.map(lambda variable: variable.role, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
