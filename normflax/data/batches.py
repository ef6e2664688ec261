"""Batches drawn on the device: a batch is a function of (data seed, step) and of nothing else.

So a run resumes without a loader's state, and runs that share a seed see the same tokens in the same order.
"""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, UInt8

from normflax.axes import Key, Mask, Tokens
from normflax.config import ConfigError, Data
from normflax.data import sources
from normflax.data.corpus import Corpus
from normflax.data.synthetic import Chain, Copy

Seed = Integer[Array, ""] | int


@dataclass(frozen=True)
class Task:
    """What a compiled program must know of the data: hashable, so it can be a static argument."""

    kind: Literal["text", "copy", "markov"]
    vocab: int
    lag: int = 0  # of the copy task


class Batch(NamedTuple):
    """B sequences of T tokens; the loss is the mean over the targets where `mask` is true."""

    inputs: Tokens
    targets: Tokens
    mask: Mask


@dataclass(frozen=True, eq=False)
class Loaded:
    """A source with what `draw` needs of it: `task` is static, `arrays` lie on the device and may be traced."""

    source: sources.Source
    task: Task
    arrays: dict[str, Array]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def sha256(self) -> str:
        return self.source.sha256


def load(data: Data) -> Loaded:
    """The source that `data` names, put on the device (`place`).

    Raises:
        ConfigError: in one sentence, which key of `data` is wrong.
    """
    return place(sources.load(data))


def place(source: sources.Source) -> Loaded:
    """A source with its arrays on the device.

    text:   {"tokens": uint8 [n]}, the training part alone.
    copy:   {}.
    markov: {"initial": float32 [V], "rows": float32 [V, V]}, cumulative sums of the stationary law and of each row.
    """
    match source:
        case Corpus():
            return Loaded(source, Task("text", source.vocab), {"tokens": jnp.asarray(source.train)})
        case Copy():
            return Loaded(source, Task("copy", source.vocab, source.lag), {})
        case Chain():
            arrays = {"initial": cumulative(source.stationary), "rows": cumulative(source.rows)}
            return Loaded(source, Task("markov", source.vocab), arrays)


def draw(task: Task, arrays: dict[str, Array], seed: Seed, step: Seed, batch: int, tokens: int) -> Batch:
    """Training batch number `step` of `seed`: [B, T] = [`batch`, `tokens`]. Pure; `seed` and `step` may be traced.

    text:   B windows of T + 1 bytes at uniform places of the training text, with replacement; targets the next byte.
    copy:   inputs uniform, targets[t] = inputs[t - lag]; the first `lag` are not valid.
    markov: B runs of the chain, the first token from the stationary law; targets the next token.

    Raises:
        ConfigError: the training text is shorter than a window, at trace time.
    """
    return sample(task, arrays, jax.random.fold_in(named_key(seed, "batch"), step), batch, tokens)


def heldout(loaded: Loaded, windows: int, tokens: int) -> Batch:
    """The fixed held-out windows [W, T] of a source, the same for every seed.

    text: evenly spaced windows of T + 1 bytes that share no byte.
    copy, markov: drawn as for training, from a key of its own that no training step has.

    Raises:
        ConfigError: the held-out text does not hold so many windows.
    """
    if isinstance(loaded.source, Corpus):
        return windows_of(loaded.source.heldout, windows, tokens)
    return sample(loaded.task, loaded.arrays, named_key(0, "heldout"), windows, tokens)


def named_key(seed: Seed, name: str) -> Key:
    """The threefry key of `seed` for one use: keys of different names are different for every seed."""
    return jax.random.fold_in(jax.random.key(jnp.uint32(seed), impl="threefry2x32"), zlib.crc32(name.encode()))


@partial(jax.jit, static_argnames=("task", "batch", "tokens"))
def sample(task: Task, arrays: dict[str, Array], key: Key, batch: int, tokens: int) -> Batch:
    """The batch [B, T] of one key, for training and for held-out sequences."""
    match task.kind:
        case "text":
            return next_token(sample_text(arrays["tokens"], key, batch, tokens))
        case "copy":
            return sample_copy(task, key, batch, tokens)
        case "markov":
            return next_token(sample_chain(arrays["initial"], arrays["rows"], key, batch, tokens))


def next_token(x: Int[Array, "B N"]) -> Batch:
    """Inputs x_0..x_{T-1} and targets x_1..x_T of N = T + 1 tokens, all valid."""
    return Batch(x[:, :-1], x[:, 1:], jnp.ones(x[:, 1:].shape, bool))


def sample_text(text: UInt8[Array, " n"], key: Key, batch: int, tokens: int) -> Int[Array, "B N"]:
    n = len(text)
    if n <= tokens:
        raise ConfigError(f"train.tokens={tokens} needs windows of {tokens + 1} bytes, but the training text has {n}")
    start = jax.random.randint(key, (batch, 1), 0, n - tokens, jnp.int32)
    return text[start + jnp.arange(tokens + 1, dtype=jnp.int32)[None]].astype(jnp.int32)


def sample_copy(task: Task, key: Key, batch: int, tokens: int) -> Batch:
    x = jax.random.randint(key, (batch, tokens), 0, task.vocab, jnp.int32)
    mask = jnp.broadcast_to(jnp.arange(tokens) >= task.lag, x.shape)
    return Batch(x, jnp.pad(x, ((0, 0), (task.lag, 0)))[:, :tokens], mask)


def sample_chain(initial: Float[Array, " V"], rows: Float[Array, "V V"], key: Key, batch: int, tokens: int) -> Int[Array, "B N"]:
    """By inversion: token j where the cumulative sum first exceeds u ~ U[0, 1)."""
    u = jax.random.uniform(key, (tokens + 1, batch, 1), jnp.float32)

    def follow(sums: Float[Array, "#B V"], u: Float[Array, "B 1"]) -> Int[Array, " B"]:
        return jnp.sum(sums <= u, axis=-1, dtype=jnp.int32)

    def advance(x, u):
        y = follow(rows[x], u)
        return y, y

    first = follow(initial[None], u[0])
    _, rest = jax.lax.scan(advance, first, u[1:])
    return jnp.concatenate([first[None], rest]).T


def cumulative(p: np.ndarray) -> Array:
    """Cumulative sums over the last axis in float32, the last exactly 1, so that no draw falls past it."""
    sums = np.cumsum(p, axis=-1)
    return jnp.asarray(sums / sums[..., -1:], jnp.float32)


def windows_of(text: UInt8[np.ndarray, " n"], windows: int, tokens: int) -> Batch:
    """W windows of T + 1 bytes at multiples of ⌊n/W⌋."""
    n, length = len(text), tokens + 1
    if n < length:
        raise ConfigError(
            f"the held-out text has {n} bytes, fewer than one window of train.tokens + 1 = {length}: raise data.heldout"
        )
    if windows * length > n:
        raise ConfigError(
            f"data.windows={windows} windows of train.tokens + 1 = {length} bytes do not fit into {n} held-out bytes:"
            f" at most {n // length} do"
        )
    start = np.arange(windows)[:, None] * (n // windows)
    return next_token(jnp.asarray(text[start + np.arange(length)], jnp.int32))
