"""A sublayer is a branch and the wiring its placement declares; a block is its two sublayers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from normflax.axes import Key, Scalar, Stream
from normflax.model.attention import SelfAttention
from normflax.model.dropout import Dropout
from normflax.model.ffn import FeedForward
from normflax.model.init import named
from normflax.model.placements import Placement, Scales


def settled(x: Stream) -> Stream:
    """x itself, computed once and kept: what is read of it can't change how the compiler fuses, and so rounds, what follows.

    The same holds for its gradient. This is what lets probes leave every bit of a run alone.
    """
    return jax.lax.optimization_barrier(x)


class Sublayer(nnx.Module):
    """One branch F in its placement: u = pre(x), y = out(F(c·u)), x' = post(a·skip + b·y).

    The state it carries is the stream x [B, T, D]. A placement with more than one stream overrides `read` (state -> what the
    branch sees) and `write` (state, what the branch saw and gave -> next state).
    """

    def __init__(self, branch: nnx.Module, placement: Placement, make_norm):
        self.branch = branch
        self.skip_from, self.scales_input = placement.skip_from, placement.input != 1
        self.pre, self.out, self.post = (make_norm(site) for site in (placement.pre, placement.out, placement.post))

    def read(self, x: Stream) -> Stream:
        """What the branch sees: u = pre(x)."""
        return self.pre(x)

    def write(self, x: Stream, u: Stream, y: Stream, entry: Stream, a: Scalar, b: Scalar) -> tuple[Stream, dict[str, Array]]:
        """The next state, and every tensor on the way to it under the name it has in the equation."""
        # The sum is a reduction of the stream: float32, whatever the stream is kept in.
        skip = a * {"x": x, "u": u, "block": entry}[self.skip_from].astype(jnp.float32)
        written = b * self.out(y).astype(jnp.float32)
        z = settled(skip + written)
        return settled(self.post(z).astype(x.dtype)), {"skip": skip, "written": written, "z": z}

    def __call__(self, x: Stream, entry: Stream, scales: Scales, dropout: Dropout | None = None) -> tuple[Stream, dict[str, Array]]:
        """x and the block's input [B, T, D], this sublayer's scales [] -> x' and the wires: what each norm reads (`pre`, `out`,
        `post`), what the branch reads (`u`) and what is added (`skip`, `written`). What nobody uses is pruned by jit."""
        u = self.read(x)
        read = (scales.input * u.astype(jnp.float32)).astype(u.dtype) if self.scales_input else u
        y = settled(self.branch(read, dropout))
        state, wires = self.write(x, u, y, entry, scales.skip, scales.branch)
        return state, {"pre": x, "u": read, "out": y, "post": wires["z"], "skip": wires["skip"], "written": wires["written"]}


class Block(nnx.Module):
    """Attention, then FFN. `gains` holds this block's gain per role, `std` the standard deviation of init=normal; `key` draws the
    weights by role."""

    def __init__(self, key: Key, gains: dict[str, Array], std: Scalar, *, placement: Placement, model, base: str, make_norm):
        shared = {"bias": model.bias, "base": base, "std": std}
        attention = SelfAttention(
            named(key, "attention"),
            gains,
            model.width,
            heads=model.heads,
            groups=model.groups,
            rope=model.positions == "rope",
            mask=model.mask,
            fused=model.fused_qkv,
            q_norm=make_norm(placement.q, model.width // model.heads),
            k_norm=make_norm(placement.k, model.width // model.heads),
            **shared,
        )
        ffn = FeedForward(named(key, "ffn"), gains, model.width, model.hidden, form=model.ffn, **shared)
        self.attention = Sublayer(attention, placement, make_norm)
        self.ffn = Sublayer(ffn, placement, make_norm)
