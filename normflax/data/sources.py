"""From the data part of a config to what it names. No jax, so that a run's id can hold the sha256 of its data."""

from dataclasses import replace

import numpy as np

from normflax.config import ConfigError, Data
from normflax.data import files, stdlib, synthetic, tokens
from normflax.data.corpus import Corpus
from normflax.data.mixture import Mixture
from normflax.nearest import unknown

Source = Corpus | synthetic.Copy | synthetic.ModK | synthetic.Chain | Mixture
NAMES = ("stdlib", "files", "tokens", "copy", "modk", "markov", "mixture")


def load(data: Data) -> Source:
    """The text, the law of the synthetic task, or the mixture that `data` names; each has `name`, `vocab` and `sha256`.

    Raises:
        ConfigError: in one sentence, which key of `data` is wrong.
    """
    match data.name:
        case "stdlib":
            return stdlib.load(data.heldout)
        case "files":
            return files.load(data.path, data.heldout)
        case "tokens":
            return tokens.load(data.path, data.heldout, data.vocab)
        case "copy":
            return synthetic.Copy(data.vocab, data.lag)
        case "modk":
            return synthetic.ModK(data.vocab, data.lag)
        case "markov":
            return synthetic.chain(data.vocab, data.concentration, data.table_seed, data.order)
        case "mixture":
            weights = np.array(data.weights or [1.0] * len(data.parts))
            return Mixture(tuple(load(part(data, name)) for name in data.parts), weights / weights.sum())
    raise ConfigError(unknown("data.name", data.name, NAMES))


def part(data: Data, name: str) -> Data:
    """The settings of one part of a mixture: `name`, or `files:PATH` or `tokens:PATH` where it has a path of its own."""
    kind, _, path = name.partition(":")
    return replace(data, name=kind, path=path or data.path, parts=[], weights=[])
