"""A text as bytes, or as tokens of a user's own, in a training and a held-out part."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from normflax.config import ConfigError

# Windows are addressed by int32 on the device.
LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes, or other token ids, to train on and ones never trained on.

    Attributes:
        name: what the run's record calls it.
        train: training text [n].
        heldout: held-out text [m].
        sha256: of the bytes or ids and of where the training part ends, in hex: all that the corpus adds to a run's numbers.
        vocab: number of token ids, 256 for bytes.
    """

    name: str
    train: Integer[np.ndarray, " n"]
    heldout: Integer[np.ndarray, " m"]
    sha256: str
    vocab: int = 256


def from_parts(name: str, train: bytes, heldout: bytes) -> Corpus:
    """The corpus of two texts.

    Raises:
        ConfigError: a part is empty, or longer than 2³¹ - 1 bytes.
    """
    for part, text in (("training", train), ("held-out", heldout)):
        if not text:
            raise ConfigError(f"data.heldout leaves the {part} part of data.name={name} empty: change data.heldout")
        if len(text) > LARGEST:
            raise ConfigError(f"the {part} part of data.name={name} has {len(text)} bytes: it may have {LARGEST}")
    digest = hashlib.sha256(len(train).to_bytes(8, "little"))
    digest.update(train)
    digest.update(heldout)
    return Corpus(name, np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8), digest.hexdigest())


def from_files(name: str, files: Sequence[tuple[str, bytes]], heldout: float) -> Corpus:
    """The corpus of (relative path, bytes), each file wholly in one part (`split_files`), joined in the given order."""
    held = split_files([(path, len(text)) for path, text in files], heldout)
    train = b"".join(text for path, text in files if path not in held)
    return from_parts(name, train, b"".join(text for path, text in files if path in held))


def from_tail(name: str, text: bytes, heldout: float) -> Corpus:
    """The corpus whose held-out part is the last ⌊`heldout`·n⌋ of n bytes."""
    cut = max(0, len(text) - int(heldout * len(text)))
    return from_parts(name, text[:cut], text[cut:])


def split_files(sizes: Iterable[tuple[str, int]], heldout: float) -> frozenset[str]:
    """The paths that are held out, of (relative path, bytes).

    In the order of the sha256 of their path, each file is held out that does not take the held-out bytes further from
    `heldout` of all bytes. So the split depends on names and sizes alone: not on the order of the files, the process's
    hash seed, or the folder they lie in.
    """
    sizes = sorted(sizes, key=lambda file: hashlib.sha256(file[0].encode("utf-8", "surrogateescape")).digest())
    missing = heldout * sum(size for _, size in sizes)
    held = set()
    for path, size in sizes:
        if size <= 2 * missing:
            held.add(path)
            missing -= size
    return frozenset(held)
