"""The losses that simple predictors reach on a run's own held-out targets: what a training curve is read against.

All in nats/token, means over the valid held-out targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int, Integer
from scipy.sparse import coo_array, csr_array

from normflax.data.corpus import Corpus
from normflax.data.mixture import Mixture
from normflax.data.sources import Source
from normflax.data.synthetic import Chain, Copy, ModK

# Pseudo-count k of the bigram level: how many pairs the unigram is worth. Of 1, 4, 16, 64 and 256 the one with the
# lowest held-out loss, for training texts of 3 kB, 30 kB, 300 kB and 9 MB alike.
STRENGTH = 64.0
# Tokens counted at a time, which bounds the memory that counting takes.
BLOCK = 2**24
# Kinds of token up to which every pair has a count of its own.
DENSE = 1024


@dataclass(frozen=True)
class Levels:
    """Reference losses in nats/token.

    Attributes:
        uniform: ln V, of a predictor that knows nothing.
        unigram: of the best prediction that ignores the context.
        bigram: of the best prediction from the last input token.
        floor: the loss of a model that knows the source; None where nobody does (text). Of a mixture a bound below it (`floor`).
    """

    uniform: float
    unigram: float
    bigram: float
    floor: float | None


def levels(
    source: Source, inputs: Int[np.ndarray, "W T"], targets: Int[np.ndarray, "W T"], mask: Bool[np.ndarray, "W T"]
) -> Levels:
    """The levels of `source` on W held-out windows of T tokens: cross-entropies of the valid targets under its `Law`.

    The floor is the only one that is not measured on the windows (`floor`).
    """
    x, y = inputs[mask], targets[mask]
    law = law_of(source, inputs.shape[1])
    return Levels(float(np.log(source.vocab)), loss(law.marginal[y]), loss(law.given(x, y)), floor(source, inputs.shape[1]))


def floor(source: Source, tokens: int) -> float | None:
    """The loss in nats/token of a model that knows the source, in sequences of T tokens; None where nobody does (text).

    markov: the entropy rate. copy, modk: 0, since the inputs determine the target. mixture: Σ_i s_i floor_i with s of
    `target_shares`, where every part has one. That is what a model would reach that is told the part of each sequence, so it is a
    lower bound: a model must find the part out. Of parts whose inputs differ that costs little, at the start of a sequence. Of copy
    and modk, whose inputs are alike, nobody can, and the best loss stays about as far above 0 as the entropy of the shares.
    """
    match source:
        case Chain():
            return source.entropy
        case Copy() | ModK():
            return 0.0
        case Mixture():
            floors = [floor(part, tokens) for part in source.parts]
            known = [value for value in floors if value is not None]
            return float(target_shares(source, tokens) @ known) if len(known) == len(floors) else None
    return None


@dataclass(frozen=True, eq=False)
class Law:
    """What the best predictors without context and with the last token say.

    Attributes:
        inputs: p(x) of an input token [V].
        marginal: p(y) of a target [V].
        given: (x, y) [N] to p(y | x) [N].
    """

    inputs: Float[np.ndarray, " V"]
    marginal: Float[np.ndarray, " V"]
    given: Callable[[np.ndarray, np.ndarray], Float[np.ndarray, " N"]]


def law_of(source: Source, tokens: int) -> Law:
    """The law of the valid targets of a source in sequences of T tokens.

    One source: `law_of_one`, whatever T is.
    mixture: p(y) = Σ_i s_i p_i(y) and p(y | x) = Σ_i s_i p_i(x) p_i(y | x) / Σ_i s_i p_i(x), with s of `target_shares`.
    """
    if isinstance(source, Mixture):
        return mixed([law_of_one(part) for part in source.parts], target_shares(source, tokens), source.vocab)
    return law_of_one(source)


def target_shares(source: Mixture, tokens: int) -> Float[np.ndarray, " parts"]:
    """s_i = w_i n_i / Σ_j w_j n_j: each part's share of the valid targets, of which its sequences of T tokens have n_i.

    n = T - lag for copy and modk, else T. The weights w count sequences, and the loss is a mean over valid targets.
    """
    valid = np.array([tokens - (part.lag if isinstance(part, Copy | ModK) else 0) for part in source.parts])
    shares = source.weights * valid
    return shares / shares.sum()


@lru_cache(maxsize=8)
def law_of_one(source: Corpus | Chain | Copy | ModK) -> Law:
    """The law of a source that is no mixture, worked out once for all runs of a process.

    text, tokens: counted on the training part (`text_law`).
    markov: the chain's own, p(y) = π(y) and p(y | x) = P(x, y)/π(x) summed over the rest of the context.
    copy, modk: tokens are independent and uniform, so neither π nor the last token says anything: 1/V.
    """
    match source:
        case Corpus():
            return text_law(source.train, source.vocab)
        case Chain():
            return Law(source.stationary, source.stationary, lambda x, y: source.after[x, y])
        case Copy() | ModK():
            uniform = np.full(source.vocab, 1 / source.vocab)
            return Law(uniform, uniform, lambda x, y: uniform[y])


def mixed(laws: Sequence[Law], shares: Float[np.ndarray, " parts"], vocab: int) -> Law:
    """The law of a mixture; a token that a part does not have is not given by it."""

    def wide(p: np.ndarray) -> np.ndarray:
        return np.pad(p, (0, vocab - len(p)))

    inputs = shares @ np.stack([wide(law.inputs) for law in laws])
    marginal = shares @ np.stack([wide(law.marginal) for law in laws])

    def given(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        joint = np.zeros(len(x))
        for s, law in zip(shares, laws, strict=True):
            known = (x < len(law.inputs)) & (y < len(law.marginal))
            joint[known] += s * law.inputs[x[known]] * law.given(x[known], y[known])
        return joint / inputs[x]

    return Law(inputs, marginal, given)


def loss(p: Float[np.ndarray, " N"]) -> float:
    """-⟨ln p⟩ of the probabilities that were given to N targets."""
    return float(-np.log(p).mean())


def text_law(ids: Integer[np.ndarray, " n"], vocab: int) -> Law:
    """Unigram p(y) and bigram p(y | x) of n tokens of V kinds, smoothed so that ln p is finite.

    p(y)     = (c(y) + 1)/(n + V)            with c(y) the count of y: one is added to each;
    p(y | x) = (c(xy) + k·p(y))/(c(x) + k)   with c(xy) the count of y after x, c(x) = Σ_y c(xy), k = `STRENGTH`.

    The second is the mean under a Dirichlet prior around the unigram (MacKay and Peto 1995, "A hierarchical Dirichlet
    language model"): after a token that the text does not hold, it is the unigram.
    """
    pairs = count_pairs(ids, vocab)
    after, before = (np.asarray(pairs.sum(axis)).ravel() for axis in (0, 1))
    unigram = after + 1.0
    unigram[ids[0]] += 1.0
    unigram /= unigram.sum()

    def given(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        seen = np.asarray(pairs[x, y]).ravel()
        return (seen + STRENGTH * unigram[y]) / (before[x] + STRENGTH)

    return Law(unigram, unigram, given)


def count_pairs(ids: Integer[np.ndarray, " n"], vocab: int):
    """How often y follows x [V, V]: an array for few kinds of token, a sparse one for many."""
    blocks = (ids[i : i + BLOCK + 1].astype(np.int64) for i in range(0, len(ids) - 1, BLOCK))
    if vocab <= DENSE:
        codes = (np.bincount(part[:-1] * vocab + part[1:], minlength=vocab * vocab) for part in blocks)
        return sum(codes, np.zeros(vocab * vocab, np.int64)).reshape(vocab, vocab)
    shape = (vocab, vocab)
    ones = (coo_array((np.ones(len(part) - 1, np.int64), (part[:-1], part[1:])), shape=shape).tocsr() for part in blocks)
    return sum(ones, csr_array(shape, dtype=np.int64))
