"""Several sources in one: each sequence comes from one of them."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sequences of source i with probability weights[i]."""

    parts: tuple[Any, ...]
    weights: Float[np.ndarray, " parts"]
    name = "mixture"

    @property
    def vocab(self) -> int:
        return max(part.vocab for part in self.parts)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(b"mixture" + self.weights.astype("<f8").tobytes())
        for part in self.parts:
            digest.update(part.sha256.encode())
        return digest.hexdigest()


def shares(weights: Float[np.ndarray, " parts"], windows: int) -> Int[np.ndarray, " parts"]:
    """Whole numbers of windows as near to the weights as can be: floors, and one more for the largest remainders."""
    exact = weights * windows
    counts = np.floor(exact).astype(int)
    most = np.argsort(counts - exact, kind="stable")[: windows - counts.sum()]
    counts[most] += 1
    return counts


def order(counts: Int[np.ndarray, " parts"]) -> Int[np.ndarray, " windows"]:
    """Where each window of the parts, one part after the other, goes, so that any first few hold about every part's share."""
    places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return np.argsort(places, kind="stable")
