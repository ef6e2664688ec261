"""A run's folder: what training writes, in a form that can be read at any moment, after `kill -9` too.

    config.yaml      the resolved config
    status.json      state, verdict, step, reason, levels, timings, versions …   replaced whole
    scalars.jsonl    one line a step                                             appended, flushed at each call
    layers/part-*    statistics by layer, tidy rows in Parquet                   whole files, renamed into place
    log.txt          what the run said
    error.txt        the traceback of a run that failed

A kill loses the layer rows since the last `flush` and at most tears the last line of scalars.jsonl.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from normflax.records import strict_json
from normflax.records.atomic import replacing

SCHEMA_VERSION = "1"
STATES = ("running", "finished", "failed", "interrupted")
LAYERS = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int32()),
        ("seed", pa.int64()),  # of the run, or of one of the models it measured
        ("block", pa.int32()),  # from 1; 0 is the embedding, null the final norm
        ("sublayer", pa.int32()),  # 0..S; null where a row belongs to a block
        ("branch", pa.string()),  # embed, attention, ffn, final
        ("site", pa.string()),  # pre, out, post, embed, final, or a role; null where neither applies
        ("field", pa.string()),  # a name of probes/fields.py
        ("value", pa.float32()),  # NaN and infinities are values; null means not logged
        ("theory", pa.float32()),  # what theory expects of a model at initialisation; null where it says nothing
    ]
)
COLUMNS = ("block", "sublayer", "branch", "site", "field", "value")


class RunExistsError(FileExistsError):
    """A run's folder is there already."""


class RunFolder:
    """One run on disk. `create` starts a new one, `open` takes one that exists, `finish` ends it."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[pa.Table] = []
        self._parts = 1 + max((int(part.stem[5:]) for part in self.parts), default=-1)

    @classmethod
    def create(cls, path: Path | str, **fields: object) -> "RunFolder":
        """Make the folder of a new run, in state `running` with these fields of status.json.

        It appears whole: nobody finds it without a status. Raises RunExistsError when anything is at `path`.
        """
        path = Path(path)
        taken = RunExistsError(f"run folder '{path}' exists: a run never writes over another")
        if path.exists():
            raise taken
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.parent / f".{path.name[-200:]}.{os.getpid()}.new"
        (new / "layers").mkdir(parents=True)
        strict_json.write(new / "status.json", {"state": "running", "started": _now()} | fields)
        try:
            new.rename(path)
        except OSError:
            shutil.rmtree(new)
            raise taken from None
        return cls(path)

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """The run at `path`. Raises FileNotFoundError when none is there."""
        path = Path(path)
        if not (path / "status.json").is_file():
            raise FileNotFoundError(f"'{path}' is no run folder: it holds no status.json")
        return cls(path)

    @property
    def id(self) -> str:
        """The run's name, that of its folder."""
        return self.path.name

    @property
    def parts(self) -> list[Path]:
        """The layer files written so far, in order."""
        return sorted((self.path / "layers").glob("part-*.parquet"))

    @property
    def status(self) -> dict[str, Any]:
        """What status.json says now."""
        return strict_json.read(self.path / "status.json")

    def update_status(self, **fields: object) -> None:
        """Set these top-level fields of status.json and keep the others."""
        if fields.get("state", "running") not in STATES:
            raise ValueError(f"state '{fields['state']}' is unknown: it is one of {', '.join(STATES)}")
        strict_json.write(self.path / "status.json", self.status | fields)

    def write_config(self, text: str) -> None:
        """Write the resolved config, a YAML text."""
        with replacing(self.path / "config.yaml") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def scalars(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line a row, complete and out of this process when the call returns."""
        text = "".join(f"{strict_json.dumps(dict(row))}\n" for row in rows)
        with (self.path / "scalars.jsonl").open("a+b") as file:
            _drop_torn_line(file)
            file.write(text.encode())

    def layers(self, step: int, seed: int, columns: Mapping[str, Any]) -> None:
        """Keep the rows of one step and seed until `flush`: columns block, sublayer, branch, site, field, value and, where there
        is one, theory, equally long.

        A column is a sequence or an array of one axis. None, or a masked entry, is null; in `value` it means not
        logged, which is not NaN. Raises ValueError for other columns or unequal lengths.
        """
        if set(columns) - {"theory"} != set(COLUMNS):
            raise ValueError(f"layer columns are {', '.join(COLUMNS)}, not {', '.join(columns)}")
        lengths = {name: len(columns[name]) for name in columns}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"layer columns differ in length: {lengths}")
        n = lengths["value"]
        columns = {"theory": [None] * n, **columns}
        arrays = [pa.array([self.id] * n, pa.string()), pa.array([step] * n, pa.int32()), pa.array([seed] * n, pa.int64())]
        arrays += [_array(columns[name], LAYERS.field(name).type) for name in (*COLUMNS, "theory")]
        self._pending.append(pa.Table.from_arrays(arrays, schema=LAYERS))

    def flush(self) -> None:
        """Write the rows kept so far as the next part."""
        if not self._pending:
            return
        metadata = {"normflax.schema": SCHEMA_VERSION, "normflax.run": self.id}
        rows = pa.concat_tables(self._pending).replace_schema_metadata(metadata)
        with replacing(self.path / "layers" / f"part-{self._parts:05d}.parquet") as temporary:
            pq.write_table(rows, temporary, compression="zstd")
        self._parts += 1
        self._pending = []

    def log(self, line: str) -> None:
        """Append a line to log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def error(self, text: str) -> None:
        """Write error.txt."""
        with replacing(self.path / "error.txt") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def finish(self, state: str = "finished", **fields: object) -> None:
        """Write what is pending, then the last status: a run that says `finished` has all its rows on disk."""
        self.flush()
        self.update_status(**fields, state=state, ended=_now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _drop_torn_line(file: IO[bytes]) -> None:
    """Cut off a last line without an end, which a kill leaves: the next row must not grow onto it."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """An Arrow column. Arrays pass through NumPy, which reads bfloat16 and device arrays; NaN is not null."""
    if not isinstance(values, (list, tuple)):
        values = np.asanyarray(values)  # any: a mask stays
        if kind == pa.float32() and values.dtype != object:
            values = values.astype(np.float32)
    return pa.array(values, kind, from_pandas=False)
