"""A run's folder: strict JSON, whole files, and what survives `kill -9`."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest

from normflax import load_table
from normflax.records import strict_json
from normflax.records.atomic import replacing
from normflax.records.store import RunExistsError, RunFolder


def rows_of(n: int, value: float = 0.5) -> dict:
    """Layer columns of `n` blocks."""
    return {
        "block": list(range(1, n + 1)),
        "sublayer": [None] * n,
        "branch": ["ffn"] * n,
        "site": [None] * n,
        "field": ["grad_block"] * n,
        "value": np.full(n, value, np.float32),
    }


# ── strict JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nonfinite_numbers_are_strings_in_the_text_and_floats_again_after_reading():
    text = strict_json.dumps({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 1.5})
    assert text == '{"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "d": 1.5}'
    back = strict_json.loads(text)
    assert math.isnan(back["a"]) and back["b"] == [math.inf, {"c": -math.inf}] and back["d"] == 1.5


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "-Infinity", '{"a": 1'])
def test_text_that_is_not_strict_is_refused(text: str):
    with pytest.raises(ValueError):
        strict_json.loads(text)


@pytest.mark.parametrize(
    ("scalar", "number"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (np.float64(0.1), 0.1),
        (np.float16(1.5), 1.5),
        (ml_dtypes.bfloat16(3.140625), 3.140625),
        (np.array(2.5, ml_dtypes.bfloat16), 2.5),
        (np.int32(16777217), 16777217),
        (np.uint8(255), 255),
        (np.bool_(True), True),
        (np.array(7), 7),
        (np.float32("nan"), "NaN"),
        (ml_dtypes.bfloat16("-inf"), "-Infinity"),
    ],
)
def test_scalars_of_every_type_become_numbers(scalar: object, number: object):
    back = json.loads(strict_json.dumps({"x": scalar}))["x"]
    assert back == number and type(back) is type(number)


def test_a_device_scalar_becomes_a_number():
    import jax.numpy as jnp

    assert strict_json.dumps([jnp.float32(1.5), jnp.bfloat16(0.25), jnp.int32(3)]) == "[1.5, 0.25, 3]"


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros(1), {1}, 1j, object()])
def test_what_is_no_scalar_is_refused(value: object):
    with pytest.raises(TypeError):
        strict_json.dumps({"x": value})


def test_a_write_that_fails_leaves_the_good_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "status.json"
    strict_json.write(path, {"step": 1})
    with pytest.raises(TypeError):
        strict_json.write(path, {"step": object()})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text('{"step"')
        raise RuntimeError
    assert strict_json.read(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_created_exclusively_and_opened_only_where_it_is(tmp_path: Path):
    run = RunFolder.create(tmp_path / "sweep" / "post-1234")
    assert run.id == "post-1234" and run.status["state"] == "running"
    with pytest.raises(RunExistsError, match="post-1234"):
        RunFolder.create(run.path)
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "sweep")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        RunFolder.open(tmp_path / "sweep")
    assert RunFolder.open(run.path).status == run.status


def test_status_fields_are_set_one_by_one_and_finish_comes_last(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    run.update_status(step=3, levels={"unigram": 3.1})
    run.update_status(step=4, heldout={"final": np.float32("nan")})
    assert run.status["step"] == 4 and run.status["levels"] == {"unigram": 3.1}
    assert math.isnan(run.status["heldout"]["final"])
    run.layers(4, 3, rows_of(2))
    run.finish(verdict="OK")
    assert (run.status["state"], run.status["verdict"]) == ("finished", "OK")
    assert run.status["started"] <= run.status["ended"]
    assert len(run.parts) == 1
    with pytest.raises(ValueError, match="state 'done' is unknown"):
        run.update_status(state="done")


def test_texts_land_in_their_files(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    run.write_config("seed: 0\n")
    run.log("one")
    run.log("two")
    run.error("Traceback: β")
    assert (run.path / "config.yaml").read_text() == "seed: 0\n"
    assert (run.path / "log.txt").read_text() == "one\ntwo\n"
    assert (run.path / "error.txt").read_text(encoding="utf-8") == "Traceback: β"


def test_scalars_are_on_disk_when_the_call_returns_one_strict_line_a_row(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    run.scalars([{"step": 0, "loss": np.float32(5.5)}, {"step": 1, "loss": math.nan}])
    run.scalars([{"step": 2, "loss": 4.0, "grad_norm": 1.0}])
    lines = (run.path / "scalars.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert json.loads(lines[1])["loss"] == "NaN"


def test_a_reopened_run_goes_on_after_the_last_whole_line_and_the_last_part(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    run.scalars([{"step": 0, "loss": 5.0}])
    run.layers(0, 3, rows_of(2))
    run.flush()
    with (run.path / "scalars.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    run = RunFolder.open(run.path)
    run.scalars([{"step": 1, "loss": 4.0}])
    run.layers(1, 3, rows_of(2))
    run.flush()
    assert load_table(run.path, "steps")["step"].tolist() == [0, 1]
    assert [part.name for part in run.parts] == ["part-00000.parquet", "part-00001.parquet"]
    assert load_table(run.path, "layers")["step"].tolist() == [0, 0, 1, 1]


def test_parts_hold_tidy_rows_where_null_nan_and_infinity_differ(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    columns = {
        "block": [0, 1, 1, None],
        "sublayer": np.array([0, 1, 2, 2]),
        "branch": np.array(["embed", "attention", "ffn", "final"]),
        "site": ["embed", None, "post", "final"],
        "field": ["second_moment"] * 4,
        "value": [1.25, math.nan, math.inf, None],
    }
    run.layers(7, 3, columns)
    later = columns | {"value": np.ma.masked_array([1.0, 2.0, 3.0, 4.0], [0, 1, 0, 0]), "theory": [0.5, None, 1.5, None]}
    run.layers(8, 2**32 - 1, later)
    run.flush()
    run.flush()
    (part,) = run.parts
    table = pq.read_table(part)
    kinds = {"run": "string", "step": "int32", "seed": "int64", "block": "int32", "sublayer": "int32", "branch": "string"}
    kinds |= {"site": "string", "field": "string", "value": "float", "theory": "float"}
    assert {field.name: str(field.type) for field in table.schema} == kinds
    assert table["run"].to_pylist() == ["run"] * 8 and table["step"].to_pylist() == [7] * 4 + [8] * 4
    assert table["seed"].to_pylist() == [3] * 4 + [2**32 - 1] * 4
    assert table["theory"].to_pylist() == [None] * 4 + [0.5, None, 1.5, None]
    assert table["block"].to_pylist()[:4] == [0, 1, 1, None]
    assert table["sublayer"].to_pylist()[:4] == [0, 1, 2, 2]
    assert table["branch"].to_pylist()[:4] == ["embed", "attention", "ffn", "final"]
    assert table["site"].to_pylist()[:4] == ["embed", None, "post", "final"]
    values = table["value"].to_pylist()
    assert values[0] == 1.25 and math.isnan(values[1]) and values[2] == math.inf and values[3] is None
    assert values[4:] == [1.0, None, 3.0, 4.0]
    metadata = table.schema.metadata
    assert (metadata[b"normflax.schema"], metadata[b"normflax.run"]) == (b"1", b"run")
    assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "ZSTD"


def test_values_of_a_device_array_are_stored(tmp_path: Path):
    import jax.numpy as jnp

    run = RunFolder.create(tmp_path / "run")
    run.layers(0, 3, rows_of(3) | {"value": jnp.arange(3, dtype=jnp.bfloat16), "block": jnp.arange(3)})
    run.flush()
    assert pq.read_table(run.parts[0])["value"].to_pylist() == [0.0, 1.0, 2.0]


def test_layer_columns_that_do_not_fit_are_refused(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    with pytest.raises(ValueError, match="differ in length"):
        run.layers(0, 3, rows_of(3) | {"block": [1]})
    with pytest.raises(ValueError, match="layer columns are"):
        run.layers(0, 3, {"value": [1.0]})


def test_a_killed_run_keeps_every_row_up_to_its_last_flush(tmp_path: Path):
    """A-32: `kill -9` in mid-run. What was flushed is read, without a gap, and nothing raises."""
    script = """
import sys
from normflax.records.store import RunFolder
run = RunFolder.create(sys.argv[1])
n = 5
columns = {"block": list(range(n)), "sublayer": [None] * n, "branch": ["ffn"] * n, "site": [None] * n,
           "field": ["grad_block"] * n, "value": [0.5] * n}
step = 0
while True:
    run.scalars([{"step": step, "loss": 1 / (step + 1), "note": 1.0} for step in range(step, step + 50)])
    run.layers(step, 3, columns)
    run.flush()
    run.update_status(step=step + 50)
    step += 50
"""
    path = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)])
    try:
        while len(list((path / "layers").glob("part-*.parquet"))) < 4:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    runs, steps, layers = (load_table(tmp_path, rows) for rows in ("runs", "steps", "layers"))
    assert [table.attrs["problems"] for table in (runs, steps, layers)] == [[], [], []]
    done = runs["step"].item()
    assert runs["state"].item() == "running" and done >= 150
    assert steps["step"].tolist() == list(range(len(steps))) and len(steps) >= done
    assert layers["step"].unique().tolist()[: done // 50] == list(range(0, done, 50))
    assert (layers.groupby("step").size() == 5).all()


def test_records_need_no_jax():
    script = (
        "import sys, normflax, normflax.records.store, normflax.records.table; normflax.load_table;sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
