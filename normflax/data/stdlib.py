"""The default text: the running Python's own standard-library sources, on every machine without a download."""

import os
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

from normflax.config import ConfigError
from normflax.data.corpus import Corpus, from_files

# Installed packages, tests, build settings, and the two folders that are tables nearly throughout
# (character maps; the language reference as one literal).
FOLDERS_OUT = re.compile(r"site-packages|dist-packages|tests?|idle_test|__pycache__|config-.*|encodings|pydoc_data")
FILES_OUT = re.compile(r"test_.*|.*_test\.py|_sysconfigdata.*")
TABLES_OUT = frozenset({"html/entities.py"})
# How the files that a script wrote say so, in their first lines.
GENERATED = re.compile(rb"auto-?generated|this file is (automatically )?generated", re.IGNORECASE)
HEAD = 256


def sources() -> list[tuple[str, bytes]]:
    """The standard library's *.py as (path relative to it, bytes), sorted by path.

    Left out: installed packages, tests, build settings, `encodings`, `pydoc_data`, `html/entities.py`, and every file
    whose first 256 bytes say that it was generated.

    Raises:
        ConfigError: this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not FOLDERS_OUT.fullmatch(name)]
        for name in names:
            file = Path(folder, name)
            path = file.relative_to(root).as_posix()
            if name.endswith(".py") and not FILES_OUT.fullmatch(name) and path not in TABLES_OUT:
                text = file.read_bytes()
                if not GENERATED.search(text[:HEAD]):
                    files.append((path, text))
    if not files:
        raise ConfigError(f"no standard-library sources are in {root}: use data.name=files and data.path instead")
    return sorted(files)


@lru_cache
def load(heldout: float) -> Corpus:
    """The standard library's sources as bytes, about `heldout` of them held out, split by file.

    The text differs between Python versions, so a result states the version and the sha256.

    Raises:
        ConfigError: this Python comes without sources, or `heldout` leaves a part empty.
    """
    return from_files("stdlib", sources(), heldout)
