"""Runs as data frames: one run or every run below a folder, whether it finished, failed, was killed or goes on.

    runs     one row a run: its config flattened with dots, how it ended, losses, levels, the verdict beside the others
    steps    one row a step of a run: what scalars.jsonl holds
    layers   one row a value, and beside it what theory expects where it expects something; what was not logged has no row, so
             a NaN was computed

Reading never writes into a run and never raises for what a kill leaves behind. A line torn by a kill is dropped;
anything else that can't be read is left out, named in `table.attrs["problems"]` and logged.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from normflax.nearest import unknown
from normflax.records import stability, strict_json
from normflax.records.stability import Verdict
from normflax.records.store import LAYERS

T = TypeVar("T")
log = logging.getLogger(__name__)

# Columns of the runs table that come from status.json: where they lie in it, and their dtype.
STATUS: dict[str, tuple[str, str]] = {
    "state": ("state", "text"),
    "verdict": ("verdict", "text"),
    "step": ("step", "Int64"),
    "diverged_at": ("diverged_at", "Int64"),
    "first_bad": ("first_bad", "text"),
    "reason": ("reason", "text"),
    "loss_initial": ("heldout.initial", "float64"),
    "loss_initial_se": ("heldout.initial_se", "float64"),
    "loss_final": ("heldout.final", "float64"),
    "loss_final_se": ("heldout.final_se", "float64"),
    "level_uniform": ("levels.uniform", "float64"),
    "level_unigram": ("levels.unigram", "float64"),
    "level_bigram": ("levels.bigram", "float64"),
    "level_floor": ("levels.floor", "float64"),
    "spikes_loss": ("spikes.loss.score", "float64"),
    "spikes_grad_norm": ("spikes.grad_norm.score", "float64"),
    "parameters": ("parameters.total", "Int64"),
    "norms": ("placement.norms", "Int64"),
    "base_init": ("placement.base_init", "text"),
    "seconds": ("timings.total", "float64"),
    "tokens_per_second": ("tokens_per_second", "float64"),
    "data.sha256": ("data.sha256", "text"),
    "version": ("versions.normflax", "text"),
    "commit": ("commit", "text"),
    "device": ("device", "text"),
    "started": ("started", "text"),
    "ended": ("ended", "text"),
}


def load_table(folder: str | Path, rows: str = "runs") -> pd.DataFrame:
    """The runs at or below `folder` as a table of `rows`: runs, steps or layers. Losses in nats per token.

    A run is a folder that holds status.json or config.yaml. Beside its config and status, a row of runs has

        loss_reference   l_ref: the best final held-out loss of any run of the same task, depth and width that finished
                         and did not fail; else the known entropy; else the bigram level. The task is every data.* key
                         but the seed and the path, the data's sha256, and train.tokens
        verdict          the run's own, or STUCK and SLOW against l_ref (`stability`); missing until a run has one
        loss_effective   l_eff = min(final held-out loss, unigram level); missing until a run has a verdict

    Raises FileNotFoundError when `folder` is not there and ValueError for other `rows`.
    """
    readers = {"runs": _runs, "steps": _steps, "layers": _layers}
    if rows not in readers:
        raise ValueError(unknown("rows", rows, readers))
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder '{folder}' to read runs from")
    problems: list[str] = []
    table = readers[rows](list(_run_folders(folder)), problems)
    for problem in problems:
        log.warning(problem)
    table.attrs["problems"] = problems
    return table


def _run_folders(folder: Path) -> Iterator[Path]:
    """Every run at or below `folder`, sorted; hidden folders, among them Hydra's, hold none."""
    for path, folders, files in os.walk(folder):
        if "status.json" in files or "config.yaml" in files:
            folders.clear()
            yield Path(path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _parsed(path: Path, parse: Callable[[str], T], empty: T, problems: list[str]) -> T:
    """`parse` of the file's text; `empty` when there is no such file, or it can't be read, which is a problem."""
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path} can't be read: {' '.join(str(error).split())}")
        return empty


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _runs(folders: list[Path], problems: list[str]) -> pd.DataFrame:
    records, keys = [], {}
    for folder in folders:
        config = _flat(_parsed(folder / "config.yaml", _config, {}, problems))
        status = _flat(_parsed(folder / "status.json", _status, {}, problems))
        if "initial.loss" in status:  # a run of no updates: the mean loss of its models
            status["heldout.initial"] = status["initial.loss"]
        own = {column: status.get(key) for column, (key, _) in STATUS.items()}
        records.append({"run": folder.name, "folder": str(folder)} | config | own)
        keys |= dict.fromkeys(config)
    columns = dict.fromkeys(["run", "folder", *keys, *STATUS])
    table = pd.DataFrame.from_records(records, columns=list(columns))
    for column, (_, kind) in STATUS.items():
        if kind != "text":
            table[column] = pd.Series(pd.to_numeric(table[column], errors="coerce"), dtype=kind)
    return _judged(table)


def _judged(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with loss_reference, the verdict beside the other runs, and loss_effective."""
    table["loss_reference"] = _reference(table)
    known = [str(verdict) for verdict in Verdict]
    columns = ("verdict", "loss_final", "level_unigram", "loss_initial", "loss_reference")
    verdicts, losses = [], []
    for own, heldout, unigram, l0, l_ref in zip(*(table[column].tolist() for column in columns), strict=True):
        verdict, loss = own, float("nan")
        if own in known:
            verdict = stability.sweep_verdict(Verdict(own), heldout=heldout, unigram=unigram, l_ref=l_ref)
            loss = stability.effective_loss(verdict, heldout=heldout, unigram=unigram, l0=l0)
        verdicts.append(verdict)
        losses.append(loss)
    table["verdict"] = pd.Series(verdicts, dtype="str")
    table["loss_effective"] = pd.Series(losses, dtype="float64")
    return table


def _reference(table: pd.DataFrame) -> pd.Series:
    """l_ref of each run. A failed run is no reference: where all are stuck, it would call the stuck ones healthy."""
    task = [column for column in table if str(column).startswith("data.") and column not in ("data.seed", "data.path")]
    groups = table.reindex(columns=[*task, "train.tokens", "model.depth", "model.width"])
    trained = (table["state"] == "finished") & table["verdict"].isin([v for v in Verdict if v not in stability.FAILED])
    loss = pd.Series(table["loss_final"])
    loss = loss.where(trained & loss.lt(float("inf")) & groups["model.depth"].notna())
    keys = [groups[key].astype(str) for key in groups]
    best = pd.Series(loss.groupby(keys, dropna=False).transform("min"))
    return best.fillna(table["level_floor"]).fillna(table["level_bigram"])


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings under their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        # A list can't be a key of a group, as a setting must be.
        leaves |= (
            _flat(value, f"{name}.") if isinstance(value, dict) else {name: tuple(value) if isinstance(value, list) else value}
        )
    return leaves


# PyYAML takes 1e-3 for text, as YAML 1.1 wants a dot in a float; this loader reads the floats of YAML 1.2.
_Yaml: Any = type("_Yaml", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _config(text: str) -> dict:
    return _mapping(yaml.load(text, Loader=_Yaml))


def _status(text: str) -> dict:
    return _mapping(strict_json.loads(text))


def _mapping(value: object) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__} where a mapping is expected")
    return value


# ── steps and layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(folders: list[Path], problems: list[str]) -> pd.DataFrame:
    frames = []
    for folder in folders:
        path = folder / "scalars.jsonl"
        rows, lost = _parsed(path, _lines, ([], 0), problems)
        if lost:
            problems.append(f"{path} has {lost} lines that can't be read")
        if rows:
            frame = pd.DataFrame.from_records(rows)
            frame.insert(0, "run", folder.name)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["run", "step", "loss"])


def _lines(text: str) -> tuple[list[dict], int]:
    """The rows of a scalars file, and how many of its lines are no rows."""
    lines = text.split("\n")[:-1]  # a kill cut short what follows the last newline
    try:
        rows = strict_json.loads(f"[{','.join(lines)}]")  # one call for the file: several times faster than one a line
    except ValueError:
        rows = [_line(line) for line in lines]
    kept = [row for row in rows if isinstance(row, dict)]
    return kept, len(lines) - len(kept)


def _line(text: str) -> object:
    try:
        return strict_json.loads(text)
    except ValueError:
        return None


def _layers(folders: list[Path], problems: list[str]) -> pd.DataFrame:
    tables = [LAYERS.empty_table()]
    for folder in folders:
        for part in sorted((folder / "layers").glob("part-*.parquet")):
            try:
                rows = pq.ParquetFile(part).read(columns=LAYERS.names).cast(LAYERS)
            except (OSError, ValueError, pa.ArrowException) as error:
                problems.append(f"{part} can't be read: {' '.join(str(error).split())}")
                continue
            tables.append(rows.filter(rows["value"].is_valid()))
    frame = pa.concat_tables(tables).to_pandas(types_mapper={pa.int32(): pd.Int32Dtype()}.get)
    return frame.astype({"step": "int32"})
