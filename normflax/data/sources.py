"""From the data part of a config to what it names. No jax, so that a run's id can hold the sha256 of its data."""

from normflax.config import ConfigError, Data
from normflax.data import files, stdlib, synthetic
from normflax.data.corpus import Corpus
from normflax.nearest import unknown

Source = Corpus | synthetic.Copy | synthetic.Chain
NAMES = ("stdlib", "files", "copy", "markov")


def load(data: Data) -> Source:
    """The text, or the law of the synthetic task, that `data` names; each has `name`, `vocab` and `sha256`.

    Raises:
        ConfigError: in one sentence, which key of `data` is wrong.
    """
    match data.name:
        case "stdlib":
            return stdlib.load(data.heldout)
        case "files":
            return files.load(data.path, data.heldout)
        case "copy":
            return synthetic.Copy(data.vocab, data.lag)
        case "markov":
            return synthetic.chain(data.vocab, data.concentration, data.table_seed)
    raise ConfigError(unknown("data.name", data.name, NAMES))
