"""The decoder-only Transformer: embedding, stack, final norm, head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from normflax.axes import Key, Logits, Stream, Tokens
from normflax.model import init, norms, stack
from normflax.model.block import Block, settled
from normflax.model.placements import Norm, Placement
from normflax.probes.observer import Observer


class Transformer(nnx.Module):
    """Tokens [B, T] -> logits [B, T, V].

        x_0 = embed(E[token] + P[position])    x_S = stack(x_0)    logits = final(x_S) W_head

    Embeddings are Normal(0, embed_std²), learned positions Normal(0, position_std²). Logits have unit variance at initialisation:
    an untied head has standard deviation D^-1/2; a tied one is the embedding, and its logits are multiplied by D^-1/2.
    `gains` [L] per role and the standard deviations may be traced.
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

        def make_norm(site: Norm | None) -> nnx.Module:
            return norms.Identity() if site is None else norms.make(site.kind or norm.kind, model.width, **options)

        def normal(name: str, *shape: int):
            return jax.random.normal(init.named(key, name), shape, jnp.float32)

        self.sites, self.remat = placement.sites, model.remat
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
        skip: Float[Array, "L kinds"],
        branch: Float[Array, "L kinds"],
        *,
        observer: Observer | None = None,
        slots: Float[Array, "states"] | None = None,
    ) -> tuple[Logits, dict]:
        """Logits, and by field what the observer saw (nothing without one): states [S + 1], sublayers [S], norms by site.

        `slots` [S + 1] receive the squared gradients of the states in their own gradients.
        """
        x = self.token_table[...][tokens]
        if self.position_table is not None:
            x = x + self.position_table[...][None, : tokens.shape[1]]
        embedded = settled(x)
        x = settled(self.embed_norm(embedded)) if self.has_embed else embedded
        if observer is None or slots is None:
            x, _ = stack.run(self.blocks, x, skip, branch, sites=self.sites, remat=self.remat)
            return self.readout(x), {}
        x, first = observer.state(x, slots[0])
        x, seen = stack.run(
            self.blocks,
            x,
            skip,
            branch,
            sites=self.sites,
            remat=self.remat,
            observer=observer,
            slots=slots[1:].reshape(skip.shape),
        )
        seen |= {field: jnp.concatenate([first[field][None], seen[field]]) for field in first}
        seen["norm_input"] |= {"embed": observer.norm(embedded)} if self.has_embed else {}
        seen["norm_input"] |= {"final": observer.norm(x)} if self.has_final else {}
        return self.readout(x), seen

    def readout(self, x: Stream) -> Logits:
        """The last state's logits."""
        h = self.final_norm(x).reshape(-1, x.shape[-1])
        head = x.shape[-1] ** -0.5 * self.token_table[...].T if self.head is None else self.head[...]
        return (h @ head).reshape(*x.shape[:-1], -1)


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
            elif role != "bias":
                found[role] = value
    return found


def roles(params: nnx.State) -> nnx.State:
    """The role of every parameter, in the structure of the parameters: q, k, v, qkv, out, up, gate, down, embed, position, head,
    gain or bias."""
    return jax.tree.map(lambda variable: variable.role, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
