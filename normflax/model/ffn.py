"""Feed-forward branches."""

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array

from normflax.axes import Key, Scalar, Stream
from normflax.model import init
from normflax.model.dropout import Dropout, dropped
from normflax.model.placements import FFN_ROLES

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": partial(jax.nn.gelu, approximate=True), "swiglu": jax.nn.silu}


class FeedForward(nnx.Module):
    """A token-wise branch of hidden width F:

        relu     down(relu(up(x)))              Vaswani et al. 2017, arXiv:1706.03762, equation 2
        gelu     down(gelu(up(x)))              Hendrycks and Gimpel 2016, arXiv:1606.08415, the tanh form
        swiglu   down(silu(gate(x)) · up(x))    Shazeer 2020, arXiv:2002.05202, equation 6

    Stream [B, T, D] -> [B, T, D]; up, gate [D, F], down [F, D].
    """

    def __init__(
        self, key: Key, gains: dict[str, Array], width: int, hidden: int, *, form: str, bias: bool, base: str, std: Scalar
    ):

        def matrix(role: str, fan_in: int, fan_out: int) -> tuple[nnx.Param, nnx.Param | None]:
            weight = nnx.Param(init.weight(key, role, (fan_in, fan_out), base, std, gains[role]), role=role)
            return weight, init.zeros("bias", fan_out) if bias else None

        self.act = ACTIVATIONS[form]
        self.up, self.up_bias = matrix("up", width, hidden)
        self.gate, self.gate_bias = matrix("gate", width, hidden) if "gate" in FFN_ROLES[form] else (None, None)
        self.down, self.down_bias = matrix("down", hidden, width)

    def __call__(self, x: Stream, dropout: Dropout | None = None) -> Stream:
        up = init.affine(x, self.up, self.up_bias)
        hidden = self.act(up) if self.gate is None else self.act(init.affine(x, self.gate, self.gate_bias)) * up
        return dropped(init.affine(hidden, self.down, self.down_bias), dropout, "result")
