"""Tasks whose best possible loss is known: copying, and an order-1 Markov chain."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True, eq=False)
class Chain:
    """A stationary Markov chain of order 1: P(x_{t+1} = j | x_t = i) = rows[i, j], x_0 ~ π, target y_t = x_{t+1}."""

    rows: Float[np.ndarray, "V V"]
    name = "markov"

    @property
    def vocab(self) -> int:
        return len(self.rows)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(b"markov" + self.rows.astype("<f8").tobytes()).hexdigest()

    @cached_property
    def stationary(self) -> Float[np.ndarray, " V"]:
        """π with πP = π and Σπ = 1, by least squares (which also serves rows so peaked that π is not unique)."""
        V = self.vocab
        system = np.vstack([self.rows.T - np.eye(V), np.ones(V)])
        law = np.linalg.lstsq(system, np.append(np.zeros(V), 1.0), rcond=None)[0].clip(min=0.0)
        return law / law.sum()

    @cached_property
    def entropy(self) -> float:
        """The entropy rate H = -Σ_i π_i Σ_j P_ij ln P_ij in nats/token: the loss of a model that knows the rows."""
        return float(-self.stationary @ plogp(self.rows).sum(-1))


def chain(vocab: int, concentration: float, table_seed: int) -> Chain:
    """The chain with rows ~ Dirichlet(concentration, …, concentration), drawn by PCG64 from `table_seed`.

    Raises:
        ConfigError: `concentration` is not above 0.
    """
    if not concentration > 0:
        raise ConfigError(f"data.concentration={concentration:g} is no Dirichlet parameter: it is above 0")
    return Chain(np.random.default_rng(table_seed).dirichlet(np.full(vocab, concentration), size=vocab))


def plogp(p: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """p ln p, with 0 ln 0 = 0."""
    return p * np.log(np.where(p > 0, p, 1.0))
