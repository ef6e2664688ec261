"""The losses that simple predictors reach on a run's own held-out targets: what a training curve is read against.

All in nats/token, means over the valid held-out targets.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from normflax.data.corpus import Corpus
from normflax.data.sources import Source
from normflax.data.synthetic import Chain, Copy

# Pseudo-count k of the bigram level: how many pairs the unigram is worth. Of 1, 4, 16, 64 and 256 the one with the
# lowest held-out loss, for training texts of 3 kB, 30 kB, 300 kB and 9 MB alike.
STRENGTH = 64.0
# Bytes counted at a time, which bounds the memory that counting takes.
BLOCK = 2**24


@dataclass(frozen=True)
class Levels:
    """Reference losses in nats/token.

    Attributes:
        uniform: ln V, of a predictor that knows nothing.
        unigram: of the best prediction that ignores the context.
        bigram: of the best prediction from the last input token.
        floor: the loss of a model that knows the source; None where nobody does (text).
    """

    uniform: float
    unigram: float
    bigram: float
    floor: float | None


def levels(
    source: Source, inputs: Int[np.ndarray, "W T"], targets: Int[np.ndarray, "W T"], mask: Bool[np.ndarray, "W T"]
) -> Levels:
    """The levels of `source` on W held-out windows of T tokens.

    text:   unigram and bigram are counted on the training text (`text_laws`); nobody knows the floor.
    markov: cross-entropies of the held-out targets under the known law, unigram -⟨ln π(y)⟩, bigram -⟨ln P(y | x)⟩;
            the floor is the entropy rate (`Chain.entropy`), which the bigram level estimates.
    copy:   tokens are independent and uniform, so neither π nor the last token says anything: both are ln V; floor 0.
    """
    x, y = inputs[mask], targets[mask]
    uniform = float(np.log(source.vocab))
    match source:
        case Corpus():
            unigram, bigram = laws_of(source)
            return Levels(uniform, loss(unigram[y]), loss(bigram[x, y]), None)
        case Chain():
            return Levels(uniform, loss(source.stationary[y]), loss(source.rows[x, y]), source.entropy)
        case Copy():
            return Levels(uniform, uniform, uniform, 0.0)


@lru_cache(maxsize=4)
def laws_of(corpus: Corpus) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, "V V"]]:
    """`text_laws` of a corpus, counted once for all runs of a process."""
    return text_laws(corpus.train)


def loss(p: Float[np.ndarray, " N"]) -> float:
    """-⟨ln p⟩ of the probabilities that were given to N targets."""
    return float(-np.log(p).mean())


def text_laws(text: UInt8[np.ndarray, " n"]) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, "V V"]]:
    """Unigram p(y) [V] and bigram p(y | x) [V, V] of a text of n bytes, V = 256, smoothed so that ln p is finite.

    p(y)     = (c(y) + 1)/(n + V)            with c(y) the count of y: one is added to each;
    p(y | x) = (c(xy) + k·p(y))/(c(x) + k)   with c(xy) the count of y after x, c(x) = Σ_y c(xy), k = `STRENGTH`.

    The second is the mean under a Dirichlet prior around the unigram (MacKay and Peto 1995, "A hierarchical Dirichlet
    language model"): after a byte that the text does not hold, it is the unigram.
    """
    pairs = np.zeros(256 * 256, np.int64)
    for i in range(0, len(text) - 1, BLOCK):
        part = text[i : i + BLOCK + 1]
        pairs += np.bincount(part[:-1].astype(np.uint16) * np.uint16(256) + part[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)
    unigram = pairs.sum(0) + 1.0
    unigram[text[0]] += 1.0
    unigram /= unigram.sum()
    return unigram, (pairs + STRENGTH * unigram) / (pairs.sum(1, keepdims=True) + STRENGTH)
