"""Runs read back as tables: columns, references, verdicts, and folders that a kill left behind."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from normflax import load_table
from normflax.records.store import RunFolder

CONFIG = """\
placement: {placement}
name: depth_stability
seed: {seed}
model:
  depth: {depth}
  width: 48
optim:
  name: adam
  rate: 1.0e-3
  clip: null
data:
  name: stdlib
  path: null
  seed: null
train:
  steps: 300
  tokens: {tokens}
"""


def make(
    folder: Path,
    placement: str = "pre",
    *,
    seed: int = 0,
    depth: int = 6,
    tokens: int = 64,
    final: float | None = 2.3,
    verdict: str | None = "OK",
    state: str = "finished",
    levels: dict[str, float | None] | None = None,
    sha256: str = "a" * 64,
    **status: Any,
) -> RunFolder:
    """A run on disk, as training leaves it."""
    run = RunFolder.create(folder / f"{placement}-d{depth}-t{tokens}-s{seed}")
    run.write_config(CONFIG.format(placement=placement, seed=seed, depth=depth, tokens=tokens))
    run.scalars([{"step": t, "loss": 5.5 - 0.25 * t, "rate": 1e-3, "skipped": 0} for t in range(4)])
    run.update_status(
        step=300,
        verdict=verdict,
        heldout={"initial": 5.6, "initial_se": 0.01, "final": final, "final_se": 0.02, "windows": 2048},
        levels={"uniform": 5.545, "unigram": 3.1, "bigram": 2.4, "floor": None} | (levels or {}),
        parameters={"total": 1000, "decayed": 900, "undecayed": 100, "matrices": 800},
        data={"name": "stdlib", "sha256": sha256},
        placement={"name": placement, "equation": "", "base_init": "xavier_normal", "norms": 13},
        timings={"compile": 1.0, "train": 2.0, "evaluate": 0.5, "total": 3.5},
        tokens_per_second=1e5,
        versions={"python": "3.11", "normflax": "0.1.0"},
        commit="abc",
        **status,
    )
    if state != "running":
        run.finish(state)
    return run


def by_placement(table: pd.DataFrame, column: str) -> dict[str, Any]:
    return dict(zip(table["placement"], table[column], strict=True))


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_of_runs_holds_the_config_the_status_and_the_levels(tmp_path: Path):
    run = make(tmp_path / "sweep" / "deep", "sandwich", seed=3, depth=24)
    for folder in (tmp_path, tmp_path / "sweep", run.path, str(run.path)):
        table = load_table(folder)
        assert len(table) == 1 and table.attrs["problems"] == []
        row = table.iloc[0]
        assert (row["run"], row["folder"]) == (run.id, str(run.path))
        assert (row["placement"], row["name"], row["seed"]) == ("sandwich", "depth_stability", 3)
        assert (row["model.depth"], row["optim.rate"], row["train.steps"]) == (24, 0.001, 300)
        assert (row["state"], row["verdict"], row["step"]) == ("finished", "OK", 300)
        assert (row["loss_initial"], row["loss_initial_se"], row["loss_final"]) == (5.6, 0.01, 2.3)
        assert row["loss_final_se"] == 0.02
        assert (row["level_uniform"], row["level_unigram"], row["level_bigram"]) == (5.545, 3.1, 2.4)
        assert math.isnan(row["level_floor"]) and row["diverged_at"] is pd.NA and pd.isna(row["reason"])
        assert (row["loss_reference"], row["loss_effective"]) == (2.3, 2.3)
        assert (row["parameters"], row["norms"], row["base_init"]) == (1000, 13, "xavier_normal")
        assert (row["seconds"], row["tokens_per_second"]) == (3.5, 1e5)
        assert (row["data.name"], row["data.sha256"], row["commit"], row["version"]) == (
            "stdlib", "a" * 64, "abc", "0.1.0",
        )  # fmt: skip
        assert table["model.depth"].dtype == int and table["loss_final"].dtype == float


def test_every_run_below_a_folder_is_found_whatever_became_of_it(tmp_path: Path):
    make(tmp_path / "a", "pre")
    make(tmp_path / "a", "post", state="failed", verdict=None, final=None, reason="MemoryError")
    make(tmp_path / "b" / "c", "deepnorm", state="interrupted", verdict=None, final=None)
    make(tmp_path / "b", "sandwich", state="running", verdict=None, final=None)
    RunFolder.create(tmp_path / "b" / "fresh")  # killed before it wrote anything
    inner = tmp_path / "a" / "pre-d6-t64-s0" / "checkpoints" / "300"  # below a run there are no runs
    inner.mkdir(parents=True)
    (inner / "config.yaml").write_text("seed: 0\n")
    hydra = tmp_path / "b" / "pre-d6-t64-s9" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text("seed: 9\n")
    table = load_table(tmp_path)
    names = ["post-d6-t64-s0", "pre-d6-t64-s0", "deepnorm-d6-t64-s0", "fresh", "sandwich-d6-t64-s0"]
    assert table["run"].tolist() == names
    states = dict(zip(table["run"], table["state"], strict=True))
    assert states["post-d6-t64-s0"] == "failed" and states["fresh"] == "running"
    assert states["deepnorm-d6-t64-s0"] == "interrupted" and states["sandwich-d6-t64-s0"] == "running"
    assert table["verdict"].notna().sum() == 1
    assert table["loss_effective"].notna().sum() == 1
    assert table.attrs["problems"] == []


def test_a_config_alone_is_a_run(tmp_path: Path):
    run = make(tmp_path)
    (run.path / "status.json").unlink()
    table = load_table(tmp_path)
    assert table["placement"].tolist() == ["pre"] and table["state"].isna().all()


def test_an_empty_folder_is_an_empty_table_and_wrong_arguments_are_named(tmp_path: Path):
    assert {"run", "verdict", "loss_reference", "loss_effective"} <= set(load_table(tmp_path).columns)
    assert {"run", "step", "loss"} <= set(load_table(tmp_path, "steps").columns)
    assert {"run", "step", "block", "field", "value"} <= set(load_table(tmp_path, "layers").columns)
    for rows in ("runs", "steps", "layers"):
        assert len(load_table(tmp_path, rows)) == 0
    with pytest.raises(ValueError, match="rows 'layer' is unknown: it is one of runs, steps, layers; did you mean 'layers'"):
        load_table(tmp_path, "layer")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_table(tmp_path / "nowhere")


def test_floats_of_every_spelling_are_numbers_and_quoted_ones_text(tmp_path: Path):
    run = make(tmp_path)
    run.write_config("a: 1e-3\nb: 1.0e-05\nc: 3E4\nd: -2.e+1\ne: .5e1\nf: '1e-3'\ng: 1e\nh: 12\ni: .nan\nj: .inf\nk: .5\n")
    row = load_table(tmp_path).iloc[0]
    assert [row[key] for key in "abcdefghjk"] == [1e-3, 1e-5, 3e4, -20.0, 5.0, "1e-3", "1e", 12, math.inf, 0.5]
    assert math.isnan(row["i"])


# ── reference and verdict ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reference_is_the_best_trained_run_of_the_same_task_depth_and_width(tmp_path: Path):
    make(tmp_path, "pre", final=2.5)
    make(tmp_path, "sandwich", final=2.2)
    make(tmp_path, "sandwich", seed=1, final=2.1)
    make(tmp_path, "pre", depth=24, final=1.9)
    make(tmp_path, "pre", tokens=128, final=1.8)
    make(tmp_path / "other", "pre", final=1.7, sha256="b" * 64)
    table = load_table(tmp_path).set_index("folder")
    want = {"pre-d6-t64-s0": 2.1, "sandwich-d6-t64-s0": 2.1, "sandwich-d6-t64-s1": 2.1}
    want |= {"pre-d24-t64-s0": 1.9, "pre-d6-t128-s0": 1.8, "other/pre-d6-t64-s0": 1.7}
    assert {k: table.at[str(tmp_path / k), "loss_reference"] for k in want} == want
    assert table.at[str(tmp_path / "pre-d6-t64-s0"), "verdict"] == "SLOW"  # 2.5 > 2.1 + 0.25 (3.1 - 2.1)
    assert (table["verdict"] == "OK").sum() == 5


@pytest.mark.parametrize("other", [{"state": "running"}, {"state": "failed"}, {"verdict": "NONFINITE"}, {"final": math.nan}])
def test_no_run_that_did_not_train_to_its_end_is_a_reference(tmp_path: Path, other: dict):
    make(tmp_path, "pre", final=2.5)
    make(tmp_path, "post", **{"final": 0.1, **other})
    assert by_placement(load_table(tmp_path), "loss_reference")["pre"] == 2.5


def test_a_stuck_run_alone_is_stuck_and_no_reference_to_itself(tmp_path: Path):
    make(tmp_path, "post", final=3.07, verdict="STUCK")
    table = load_table(tmp_path)
    assert (table["loss_reference"].item(), table["verdict"].item()) == (2.4, "STUCK")
    make(tmp_path / "markov", "post", final=3.07, verdict="STUCK", levels={"floor": 1.9})
    assert load_table(tmp_path / "markov")["loss_reference"].item() == 1.9


def test_the_sweep_finds_the_stuck_ones_against_its_best_and_rewrites_no_run(tmp_path: Path):
    make(tmp_path, "pre", final=1.0)
    stuck = make(tmp_path, "post", final=2.95, verdict="OK")  # less than a tenth of the way from 3.1 to 1.0
    spiked = make(tmp_path, "sandwich", final=1.1, verdict="OK_SPIKED")
    make(tmp_path, "deepnorm", final=None, verdict="NONFINITE", diverged_at=17, first_bad="block 3 attention")
    before = {run.path: (run.path / "status.json").read_bytes() for run in (stuck, spiked)}
    table = load_table(tmp_path)
    assert by_placement(table, "verdict") == {
        "pre": "OK", "post": "STUCK", "sandwich": "OK_SPIKED", "deepnorm": "NONFINITE",
    }  # fmt: skip
    assert by_placement(table, "loss_effective") == {"pre": 1.0, "post": 2.95, "sandwich": 1.1, "deepnorm": 3.1}
    assert by_placement(table, "diverged_at")["deepnorm"] == 17
    assert by_placement(table, "first_bad")["deepnorm"] == "block 3 attention"
    assert table["loss_final"].min() == 1.0
    for path, content in before.items():
        assert (path / "status.json").read_bytes() == content


def test_a_loss_without_bound_and_a_task_that_is_not_known_give_no_reference(tmp_path: Path):
    make(tmp_path / "a", final=math.inf)
    assert load_table(tmp_path / "a")["loss_reference"].item() == 2.4
    for seed, final in ((0, 2.5), (1, 2.1)):
        (make(tmp_path / "b", seed=seed, final=final).path / "config.yaml").unlink()
    assert load_table(tmp_path / "b")["loss_reference"].tolist() == [2.4, 2.4]


def test_the_seed_is_no_part_of_the_task(tmp_path: Path):
    for seed, final in ((0, 2.3), (1, 2.2)):
        run = make(tmp_path, seed=seed, final=final)
        config = (run.path / "config.yaml").read_text().replace("  seed: null", f"  seed: {seed}")
        run.write_config(config)
    assert load_table(tmp_path)["loss_reference"].tolist() == [2.2, 2.2]


# ── steps and layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_of_every_run_with_late_columns_empty_before_they_appear(tmp_path: Path):
    """A-31: one set of columns, nothing shifted."""
    run = make(tmp_path, "pre")
    run.scalars([{"step": 4, "loss": math.nan, "grad_norm": 2.0}])
    make(tmp_path, "post")
    table = load_table(tmp_path, "steps")
    assert table.columns.tolist()[:3] == ["run", "step", "loss"]
    assert table.groupby("run").size().to_dict() == {"post-d6-t64-s0": 4, "pre-d6-t64-s0": 5}
    late = table[table["run"] == "pre-d6-t64-s0"]
    assert late["step"].tolist() == [0, 1, 2, 3, 4] and table["step"].dtype == int
    np.testing.assert_array_equal(late["grad_norm"], [np.nan] * 4 + [2.0])
    np.testing.assert_array_equal(late["loss"], [5.5, 5.25, 5.0, 4.75, np.nan])
    np.testing.assert_array_equal(late["rate"], [1e-3] * 4 + [np.nan])


def test_layers_keep_nan_and_infinity_and_leave_out_what_was_not_logged(tmp_path: Path):
    run = make(tmp_path)
    columns = {
        "block": [0, 1, None, 1],
        "sublayer": [0, None, 2, 1],
        "branch": ["embed", "ffn", "final", "ffn"],
        "site": ["embed", "down", "final", None],
        "field": ["variance", "grad_matrix", "norm_input", "branch_ratio"],
        "value": [1.5, math.nan, math.inf, None],
    }
    for step in (0, 10):
        run.layers(step, 3, columns)
        run.flush()
    table = load_table(tmp_path, "layers")
    assert table.columns.tolist() == ["run", "step", "seed", "block", "sublayer", "branch", "site", "field", "value", "theory"]
    assert table["step"].tolist() == [0, 0, 0, 10, 10, 10] and table["run"].unique().tolist() == [run.id]
    np.testing.assert_array_equal(table["value"][:3], np.float32([1.5, np.nan, np.inf]))
    assert table["value"].dtype == np.float32
    assert table["block"].tolist()[:2] == [0, 1] and table["block"].isna().tolist()[:3] == [False, False, True]
    assert table["sublayer"].isna().tolist()[:3] == [False, True, False]
    assert table[table["field"] == "norm_input"]["sublayer"].tolist() == [2, 2]


# ── what can't be read ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_torn_last_line_is_dropped_without_a_word(tmp_path: Path):
    run = make(tmp_path)
    with (run.path / "scalars.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 5.')
    table = load_table(tmp_path, "steps")
    assert table["step"].tolist() == [0, 1, 2, 3] and table.attrs["problems"] == []


def test_what_is_broken_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    good, bad = make(tmp_path, "pre"), make(tmp_path, "post")
    rows = {key: [1, 1] for key in ("block", "sublayer")} | {key: ["ffn"] * 2 for key in ("branch", "site", "field")}
    for run in (good, bad):
        for step in range(2):
            run.layers(step, 3, rows | {"value": [0.5, 1.5]})
            run.flush()
    half = bad.parts[1].read_bytes()
    bad.parts[1].write_bytes(half[: len(half) // 2])
    shutil.copy(good.parts[0], good.path / "layers" / ".part-00002.parquet.123")  # a part that a kill left unrenamed
    scalars = bad.path / "scalars.jsonl"
    scalars.write_text(scalars.read_text().replace('{"step": 1,', '{"step": \0') + "3\n")
    (bad.path / "status.json").write_text("{")
    (bad.path / "config.yaml").write_text("a: [1\n")

    layers = load_table(tmp_path, "layers")
    assert layers.groupby("run").size().to_dict() == {good.id: 4, bad.id: 2}
    assert len(layers.attrs["problems"]) == 1 and "part-00001.parquet" in layers.attrs["problems"][0]
    steps = load_table(tmp_path, "steps")
    assert steps.loc[steps["run"] == bad.id, "step"].tolist() == [0, 2, 3]
    assert steps.attrs["problems"] == [f"{scalars} has 2 lines that can't be read"]
    runs = load_table(tmp_path)
    assert runs["run"].tolist() == [bad.id, good.id] and runs["state"].isna().tolist() == [True, False]
    assert runs["loss_reference"].isna().tolist() == [True, False]
    assert len(runs.attrs["problems"]) == 2
    assert len(caplog.records) == 4
