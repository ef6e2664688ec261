"""Tasks whose best possible loss is known: copying, adding, and a Markov chain."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from normflax.config import ConfigError


@dataclass(frozen=True)
class Copy:
    """x_t uniform and independent over `vocab` tokens, target y_t = x_{t-lag}; no target before t = lag.

    The target is in the input, so the best loss is 0, but only a model that looks `lag` tokens back reaches it.
    """

    vocab: int
    lag: int
    name = "copy"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"copy vocab={self.vocab} lag={self.lag}".encode()).hexdigest()


@dataclass(frozen=True)
class ModK:
    """x_t uniform and independent over `vocab` tokens V, target y_t = (x_t + x_{t-lag}) mod V; no target before t = lag.

    Either token alone says nothing of the target, so a model must find one and add it to the other. The best loss is 0.
    """

    vocab: int
    lag: int
    name = "modk"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"modk vocab={self.vocab} lag={self.lag}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Chain:
    """A stationary Markov chain of order k: P(x_t = j | x_{t-k} … x_{t-1}) = rows[c, j], target y_t = x_{t+1}.

    A context c = Σ_i x_{t-1-i} V^i is its k tokens as the digits of a number, the last token the lowest one. The first k tokens
    follow the stationary law of contexts.
    """

    rows: Float[np.ndarray, "C V"]
    order: int = 1
    name = "markov"

    @property
    def vocab(self) -> int:
        return self.rows.shape[1]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(b"markov" + self.rows.astype("<f8").tobytes()).hexdigest()

    @cached_property
    def contexts(self) -> Float[np.ndarray, " C"]:
        """The stationary law of contexts [V^k]. Raises ConfigError where it is not found (`at_rest_of_many`)."""
        if self.order == 1 or len(self.rows) <= FEW:
            return at_rest(transitions(self.rows))
        return at_rest_of_many(self.rows)

    @cached_property
    def pairs(self) -> Float[np.ndarray, "V V"]:
        """P(x_t = i, x_{t+1} = j), stationary."""
        joint = self.contexts[:, None] * self.rows
        return joint.reshape(-1, self.vocab, self.vocab).sum(0)

    @cached_property
    def after(self) -> Float[np.ndarray, "V V"]:
        """P(x_{t+1} = j | x_t = i), stationary: all that the last token alone says. Uniform after a token that never comes."""
        if self.order == 1:
            return self.rows
        law = self.stationary[:, None]
        return np.divide(self.pairs, law, out=np.full_like(self.pairs, 1 / self.vocab), where=law > 0)

    @cached_property
    def stationary(self) -> Float[np.ndarray, " V"]:
        """The stationary law of one token."""
        return self.contexts.reshape(-1, self.vocab).sum(0)

    @cached_property
    def entropy(self) -> float:
        """The entropy rate H = -Σ_c π_c Σ_j P_cj ln P_cj in nats/token: the loss of a model that knows the rows.

        (Until k tokens have been seen nobody reaches it: the first k - 1 targets of a window cost more.)
        """
        return float(-self.contexts @ plogp(self.rows).sum(-1))


FEW = 512
"""Contexts up to which the matrix of their transitions is written out."""


def transitions(rows: Float[np.ndarray, "C V"]) -> Float[np.ndarray, "C C"]:
    """From context to context: token j leads from c to (c·V + j) mod V^k."""
    contexts, V = rows.shape
    c = np.arange(contexts)[:, None]
    out = np.zeros((contexts, contexts))
    out[c, (c * V + np.arange(V)) % contexts] = rows
    return out


def at_rest(matrix: Float[np.ndarray, "C C"]) -> Float[np.ndarray, " C"]:
    """π with πP = π and Σπ = 1, by least squares (which also serves rows so peaked that π is not unique)."""
    n = len(matrix)
    system = np.vstack([matrix.T - np.eye(n), np.ones(n)])
    law = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)[0].clip(min=0.0)
    return law / law.sum()


def at_rest_of_many(rows: Float[np.ndarray, "C V"]) -> Float[np.ndarray, " C"]:
    """π of many contexts without their matrix, of which each has only V entries: the eigenvector of eigenvalue 1.

    Implicitly restarted Arnoldi iteration from the uniform law (Lehoucq, Sorensen and Yang 1998, "ARPACK users' guide"). A chain
    that hardly ever leaves a part of its contexts has many eigenvalues next to 1, so what comes out is held against πP = π.

    Raises:
        ConfigError: no law was found that stays as it is to 1e-9.
    """
    from scipy.sparse import linalg  # slow to import

    solver: Any = linalg  # whose types are given wrongly
    contexts, V = rows.shape

    def move(law: np.ndarray) -> np.ndarray:
        # From (oldest, rest) with token j to (rest, j): the oldest token, the highest digit, is summed away.
        return (law.reshape(-1, 1) * rows).reshape(V, -1, V).sum(0).ravel()

    step = solver.LinearOperator((contexts, contexts), matvec=move, dtype=np.float64)
    start = np.full(contexts, 1 / contexts)
    law = start
    with suppress(solver.ArpackError):
        _, vectors = solver.eigs(step, k=1, which="LR", v0=start, ncv=min(20, contexts), maxiter=1000)
        vector = vectors[:, 0].real
        law = (vector * np.sign(vector.sum())).clip(min=0.0)
        law /= law.sum()
    if not np.abs(move(law) - law).sum() < 1e-9:
        raise ConfigError(
            f"the chain of data.name=markov with data.vocab={V} and {contexts} contexts does not come to rest:"
            " raise data.concentration or lower data.order"
        )
    return law


LARGEST_TABLE = 2**24
"""Probabilities that the rows of a chain may hold."""


def chain(vocab: int, concentration: float, table_seed: int, order: int = 1) -> Chain:
    """The chain with rows ~ Dirichlet(concentration, …, concentration), drawn by PCG64 from `table_seed`.

    Raises:
        ConfigError: `concentration` is not above 0, or the table is too large.
    """
    if not concentration > 0:
        raise ConfigError(f"data.concentration={concentration:g} is no Dirichlet parameter: it is above 0")
    if vocab ** (order + 1) > LARGEST_TABLE:
        raise ConfigError(
            f"data.order={order} with data.vocab={vocab} makes a table of {vocab}^{order + 1} probabilities:"
            f" it has at most {LARGEST_TABLE}"
        )
    rows = np.random.default_rng(table_seed).dirichlet(np.full(vocab, concentration), size=vocab**order)
    return Chain(rows, order)


def plogp(p: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """p ln p, with 0 ln 0 = 0."""
    return p * np.log(np.where(p > 0, p, 1.0))
