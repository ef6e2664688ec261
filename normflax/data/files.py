"""A user's own text: a file, a folder or a glob, as bytes."""

import glob
import os
from pathlib import Path

from normflax.config import ConfigError
from normflax.data.corpus import Corpus, from_files, from_tail

# With fewer files than this, one file can be most of a part; the end of the text is then the fairer held-out part.
SPLIT_BY_FILE = 10


def load(path: str | None, heldout: float) -> Corpus:
    """The text at `path`: one file, a folder (its files, and those of its folders), or a glob (`**` crosses folders).

    Files are sorted by their path; hidden files and folders are left out of folders and globs. With 10 files or more
    each lies wholly in one part (`corpus.split_files`), else the last `heldout` of the joined bytes is held out.

    Raises:
        ConfigError: `path` is missing or names no file, its files are empty, or `heldout` leaves a part empty.
    """
    if not path:
        raise ConfigError("data.name=files needs data.path: a text file, a folder or a glob")
    found = find(path)
    if not found:
        raise ConfigError(f"data.path={path} names no file: it is a text file, a folder with files, or a glob")
    files = [(name, file.read_bytes()) for name, file in found]
    text = b"".join(text for _, text in files)
    if not text:
        raise ConfigError(f"data.path={path} holds no text: its {len(files)} file(s) are empty")
    return from_files("files", files, heldout) if len(files) >= SPLIT_BY_FILE else from_tail("files", text, heldout)


def find(path: str) -> list[tuple[str, Path]]:
    """The files at `path` as (name relative to the folder they share, file), sorted by name."""
    where = Path(path).expanduser()
    if where.is_file():
        return [(where.name, where)]
    found = where.rglob("*") if where.is_dir() else map(Path, glob.glob(str(where), recursive=True))
    matches = {match for match in found if match.is_file()}
    if not matches:
        return []
    root = where if where.is_dir() else Path(os.path.commonpath([match.parent for match in matches]))
    files = [(match.relative_to(root), match) for match in matches]
    return sorted((name.as_posix(), file) for name, file in files if not hidden(name))


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
