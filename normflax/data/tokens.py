"""A user's own tokens: ids in a `.npy` array, or in a `.bin` file of 16-bit numbers."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from normflax.config import ConfigError
from normflax.data.corpus import LARGEST, Corpus

BLOCK = 2**24
"""Ids looked at a time."""


def load(path: str | None, heldout: float, vocab: int) -> Corpus:
    """The ids in the file at `path`, the last `heldout` of them held out; they lie in 0 … `vocab` - 1.

    `.npy`: an array of integers with one axis. `.bin`: unsigned 16-bit little-endian numbers without a header. The same ids have
    the same sha256, whatever they are stored in. They stay on disk where they are stored as small as they can be.

    Raises:
        ConfigError: `path` is missing or no such file, an id is not below `vocab` or is negative, or a part is empty.
    """
    ids = opened(path)
    name = f"data.path={path}"
    cut = max(0, len(ids) - int(heldout * len(ids)))
    for part, length in (("training", cut), ("held-out", len(ids) - cut)):
        if not 0 < length <= LARGEST:
            raise ConfigError(f"data.heldout={heldout} gives the {part} part of {name} {length} of its ids: it has 1 to {LARGEST}")
    digest = hashlib.sha256(b"tokens" + cut.to_bytes(8, "little"))
    for block in blocks(ids):
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab:
            raise ConfigError(f"{name} holds the id {low if low < 0 else high}: ids are 0 to data.vocab - 1 = {vocab - 1}")
        digest.update(block.astype("<i4").tobytes())
    small = next(kind for kind in (np.uint8, np.uint16, np.int32) if vocab - 1 <= np.iinfo(kind).max)
    return Corpus("tokens", ids[:cut].astype(small, copy=False), ids[cut:].astype(small, copy=False), digest.hexdigest(), vocab)


def opened(path: str | None) -> Integer[np.ndarray, " n"]:
    """The file's ids, read from disk as they are needed."""
    if not path:
        raise ConfigError("data.name=tokens needs data.path: a .npy or .bin file of token ids")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.path={path} is no file: data.name=tokens takes a .npy or .bin file of token ids")
    if file.suffix == ".npy":
        try:
            ids = np.lib.format.open_memmap(file, mode="r")
        except ValueError as error:
            raise ConfigError(f"data.path={path} is no .npy array: {' '.join(str(error).split())}") from None
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ConfigError(f"data.path={path} holds {ids.dtype} with {ids.ndim} axes: token ids are integers with one axis")
        return ids
    if file.suffix == ".bin":
        if file.stat().st_size % 2:
            raise ConfigError(f"data.path={path} has {file.stat().st_size} bytes, which is no number of 16-bit ids")
        return np.memmap(file, "<u2", "r") if file.stat().st_size else np.empty(0, np.uint16)
    raise ConfigError(f"data.path={path} ends in '{file.suffix}': token ids come in .npy or .bin")


def blocks(ids: Integer[np.ndarray, " n"]) -> Iterator[Integer[np.ndarray, " m"]]:
    """The ids, some at a time."""
    for start in range(0, len(ids), BLOCK):
        yield np.asarray(ids[start : start + BLOCK])
