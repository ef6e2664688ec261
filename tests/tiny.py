"""The smallest run there is, as settings and as words of a command line: tests that use it share its programs."""

import jax
import jax.numpy as jnp
from flax import nnx

from normflax.build import hyper_part, static_part, transformer
from normflax.config import Config, Data, Model, Train, change
from normflax.data import batches

TINY = Config(
    model=Model(depth=2, width=8, heads=2),
    data=Data(name="copy", vocab=8, windows=4),
    train=Train(steps=3, batch=2, tokens=8),
)

WORDS = [
    "data=copy",
    "data.vocab=8",
    "data.windows=4",
    "model.depth=2",
    "model.width=8",
    "model.heads=2",
    "train.steps=3",
    "train.batch=2",
    "train.tokens=8",
]


def tiny(**settings) -> Config:
    """TINY with some settings changed: tiny(seed=1, optim__rate=0.1)."""
    return change(TINY, **settings)


def filled(config: Config, value: float = 0.0) -> nnx.State:
    """The parameters of the run's model, every one of them `value`: shapes and roles without compiling anything."""
    static = static_part(config, batches.load(config.data).task)
    shapes = nnx.split(nnx.eval_shape(lambda: transformer(static, hyper_part(config))))[1]
    return jax.tree.map(lambda s: jnp.full(s.shape, value, s.dtype), shapes)
