"""Batches drawn on the device: a batch is a function of (data seed, step) and of nothing else.

So a run resumes without a loader's state, and runs that share a seed see the same tokens in the same order.
"""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from normflax.axes import Key, Mask, Tokens
from normflax.config import ConfigError, Data
from normflax.data import sources
from normflax.data.corpus import Corpus
from normflax.data.mixture import Mixture, order, shares
from normflax.data.synthetic import Chain, Copy, ModK

Seed = Integer[Array, ""] | int


@dataclass(frozen=True)
class Task:
    """What a compiled program must know of the data: hashable, so it can be a static argument."""

    kind: Literal["text", "copy", "modk", "markov", "mixture"]
    vocab: int
    lag: int = 0  # of copy and modk
    order: int = 1  # of markov
    length: int = 0  # of a text or tokens: a program is compiled for as many
    parts: tuple["Task", ...] = ()  # of a mixture


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
    arrays: dict[str, Any]

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

    text, tokens: {"tokens": integers [n]}, the training part alone.
    copy, modk:   {}.
    markov:       {"initial": float32 [V^k], "rows": float32 [V^k, V]}, cumulative sums of the law of contexts and of each row.
    mixture:      {"weights": float32 [parts], cumulative, "parts": the arrays of each}.
    """
    match source:
        case Corpus():
            # A copy: `asarray` may share the memory of a file that changes later.
            return Loaded(source, Task("text", source.vocab, length=len(source.train)), {"tokens": jnp.array(source.train)})
        case Copy():
            return Loaded(source, Task("copy", source.vocab, source.lag), {})
        case ModK():
            return Loaded(source, Task("modk", source.vocab, source.lag), {})
        case Chain():
            arrays = {"initial": cumulative(source.contexts), "rows": cumulative(source.rows)}
            return Loaded(source, Task("markov", source.vocab, order=source.order), arrays)
        case Mixture():
            parts = [place(part) for part in source.parts]
            arrays = {"weights": cumulative(source.weights), "parts": [part.arrays for part in parts]}
            return Loaded(source, Task("mixture", source.vocab, parts=tuple(part.task for part in parts)), arrays)


def draw(task: Task, arrays: dict[str, Any], seed: Seed, step: Seed, batch: int, tokens: int) -> Batch:
    """Training batch number `step` of `seed`: [B, T] = [`batch`, `tokens`]. Pure; `seed` and `step` may be traced.

    text, tokens: B windows of T + 1 ids at uniform places of the training part, with replacement; targets the next id.
    copy:         inputs uniform, targets[t] = inputs[t - lag]; the first `lag` are not valid.
    modk:         the same with targets[t] = (inputs[t] + inputs[t - lag]) mod V.
    markov:       B runs of the chain, the first tokens from the stationary law; targets the next token.
    mixture:      each sequence as one of the parts draws it, which one by the weights.

    Raises:
        ConfigError: the training text is shorter than a window, at trace time.
    """
    return sample(task, arrays, jax.random.fold_in(named_key(seed, "batch"), step), batch, tokens)


def heldout(loaded: Loaded, windows: int, tokens: int) -> Batch:
    """The fixed held-out windows [W, T] of a source, the same for every seed.

    text, tokens: evenly spaced windows of T + 1 ids that share none.
    copy, modk, markov: drawn as for training, from a key of its own that no training step has.
    mixture: of each part its own, as many as its weight says, so that any first few windows hold about every part's share.

    Raises:
        ConfigError: the held-out text does not hold so many windows.
    """
    if not isinstance(loaded.source, Mixture):
        return own_windows(loaded, windows, tokens, windows)
    counts = shares(loaded.source.weights, windows)
    parts = map(Loaded, loaded.source.parts, loaded.task.parts, loaded.arrays["parts"])
    found = [own_windows(part, int(n), tokens, windows) for part, n in zip(parts, counts, strict=True) if n]
    return jax.tree.map(lambda *x: jnp.concatenate(x)[order(counts)], *found)


def own_windows(loaded: Loaded, windows: int, tokens: int, asked: int) -> Batch:
    """The held-out windows [W, T] of a source that is no mixture, as part of the `asked` windows of a run."""
    if isinstance(loaded.source, Corpus):
        return windows_of(loaded.source, windows, tokens, asked)
    return sample(loaded.task, loaded.arrays, named_key(0, "heldout"), windows, tokens)


def named_key(seed: Seed, name: str) -> Key:
    """The threefry key of `seed` for one use: keys of different names are different for every seed."""
    return jax.random.fold_in(jax.random.key(jnp.uint32(seed), impl="threefry2x32"), zlib.crc32(name.encode()))


@partial(jax.jit, static_argnames=("task", "batch", "tokens"))
def sample(task: Task, arrays: dict[str, Any], key: Key, batch: int, tokens: int) -> Batch:
    """The batch [B, T] of one key, for training and for held-out sequences."""
    match task.kind:
        case "text":
            return next_token(sample_text(arrays["tokens"], key, batch, tokens))
        case "copy" | "modk":
            return sample_pairs(task, key, batch, tokens)
        case "markov":
            return next_token(sample_chain(task, arrays["initial"], arrays["rows"], key, batch, tokens))
        case "mixture":
            return sample_mixture(task, arrays, key, batch, tokens)


def next_token(x: Int[Array, "B N"]) -> Batch:
    """Inputs x_0..x_{T-1} and targets x_1..x_T of N = T + 1 tokens, all valid."""
    return Batch(x[:, :-1], x[:, 1:], jnp.ones(x[:, 1:].shape, bool))


def sample_text(text: Integer[Array, " n"], key: Key, batch: int, tokens: int) -> Int[Array, "B N"]:
    n = len(text)
    if n <= tokens:
        raise ConfigError(f"train.tokens={tokens} needs windows of {tokens + 1} tokens, but the training text has {n}")
    start = jax.random.randint(key, (batch, 1), 0, n - tokens, jnp.int32)
    return text[start + jnp.arange(tokens + 1, dtype=jnp.int32)[None]].astype(jnp.int32)


def sample_pairs(task: Task, key: Key, batch: int, tokens: int) -> Batch:
    """copy and modk, whose targets pair a token with the one `lag` places back."""
    x = jax.random.randint(key, (batch, tokens), 0, task.vocab, jnp.int32)
    back = jnp.pad(x, ((0, 0), (task.lag, 0)))[:, :tokens]
    mask = jnp.broadcast_to(jnp.arange(tokens) >= task.lag, x.shape)
    return Batch(x, back if task.kind == "copy" else (x + back) % task.vocab, mask)


def sample_chain(
    task: Task, initial: Float[Array, " C"], rows: Float[Array, "C V"], key: Key, batch: int, tokens: int
) -> Int[Array, "B N"]:
    """By inversion: a context, then token after token j where the cumulative sum first exceeds u ~ U[0, 1)."""
    V, k = task.vocab, task.order
    u = jax.random.uniform(key, (tokens + 2 - k, batch, 1), jnp.float32)

    def advance(context, u):
        y = jnp.sum(rows[context] <= u, axis=-1, dtype=jnp.int32)
        return (context * V + y) % V**k, y

    context = jnp.searchsorted(initial, u[0, :, 0], side="right").astype(jnp.int32)
    first = jnp.stack([context // V**i % V for i in reversed(range(k))])
    _, rest = jax.lax.scan(advance, context, u[1:])
    return jnp.concatenate([first, rest]).T


def sample_mixture(task: Task, arrays: dict[str, Any], key: Key, batch: int, tokens: int) -> Batch:
    """Every part draws a whole batch with a key of its own, and each sequence is taken from one of them."""
    keys = jax.random.split(key, len(task.parts) + 1)
    chosen = jnp.searchsorted(arrays["weights"], jax.random.uniform(keys[-1], (batch,), jnp.float32), side="right")
    drawn = [sample(*part, keys[i], batch, tokens) for i, part in enumerate(zip(task.parts, arrays["parts"], strict=True))]
    return jax.tree.map(lambda *x: jnp.stack(x)[chosen, jnp.arange(batch)], *drawn)


def cumulative(p: np.ndarray) -> Array:
    """Cumulative sums over the last axis in float32, the last exactly 1, so that no draw falls past it."""
    sums = np.cumsum(p, axis=-1)
    return jnp.asarray(sums / sums[..., -1:], jnp.float32)


def windows_of(corpus: Corpus, windows: int, tokens: int, asked: int) -> Batch:
    """W windows of T + 1 ids at multiples of ⌊n/W⌋ of the held-out part."""
    n, length = len(corpus.heldout), tokens + 1
    if n < length:
        raise ConfigError(
            f"the held-out part of {corpus.name} has {n} tokens, fewer than one window of train.tokens + 1 = {length}:"
            " raise data.heldout"
        )
    if windows * length > n:
        raise ConfigError(
            f"data.windows={asked} takes {windows} windows of train.tokens + 1 = {length} tokens from {corpus.name}, which do"
            f" not fit into {n} held-out tokens: at most {n // length} do"
        )
    start = np.arange(windows)[:, None] * (n // windows)
    return next_token(jnp.asarray(corpus.heldout[start + np.arange(length)], jnp.int32))
