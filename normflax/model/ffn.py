"""Feed-forward branches."""

import jax
from flax import nnx
from jaxtyping import Array

from normflax.axes import Key, Scalar, Stream
from normflax.model import init
from normflax.model.placements import FFN_ROLES


class FeedForward(nnx.Module):
    """A token-wise branch of hidden width F:

        gelu     down(gelu(up(x)))              Hendrycks and Gimpel 2016, arXiv:1606.08415, the tanh form
        swiglu   down(silu(gate(x)) · up(x))    Shazeer 2020, arXiv:2002.05202, equation 6

    Stream [B, T, D] -> [B, T, D]; up, gate [D, F], down [F, D].
    """

    def __init__(
        self, key: Key, gains: dict[str, Array], width: int, hidden: int, *, form: str, bias: bool, base: str, std: Scalar
    ):
        self.form = form
        shapes = {"up": (width, hidden), "gate": (width, hidden), "down": (hidden, width)}
        for role in FFN_ROLES[form]:
            setattr(self, role, nnx.Param(init.weight(key, role, shapes[role], base, std, gains[role]), role=role))
            setattr(self, f"{role}_bias", init.zeros("bias", shapes[role][1]) if bias else None)

    def __call__(self, x: Stream) -> Stream:
        up = init.affine(x, self.up, self.up_bias)
        if self.form == "swiglu":
            hidden = jax.nn.silu(init.affine(x, self.gate, self.gate_bias)) * up
        else:
            hidden = jax.nn.gelu(up, approximate=True)
        return init.affine(hidden, self.down, self.down_bias)
