"""The table of fields, the rows they become, and the steps at which they are read."""

import numpy as np
import pytest

from normflax.probes.fields import FIELDS, at_start, besides, chosen, on_batch
from normflax.probes.schedule import probed_steps
from normflax.probes.tidy import COLUMNS, tidy


def test_every_field_says_what_it_is():
    for name, field in FIELDS.items():
        assert field.symbol and field.unit and len(field.definition) > 20, name
        assert field.metric in {f"M{n:02d}" for n in (*range(1, 7), *range(10, 13), *range(18, 21), *range(22, 27), 29)} | {
            f"M06{x}" for x in "bcd"
        }


def test_fields_are_chosen_in_the_order_of_the_table():
    assert chosen(("all",)) == chosen(("peak", "all")) == tuple(FIELDS)
    assert chosen(("peak", "second_moment")) == ("second_moment", "peak") and chosen(()) == ()
    core = chosen(("core",))
    assert "grad_block" in core and "log_z" in core and not {"attention_entropy", "max_logit", "model_update", "angle"} & set(core)
    assert chosen(("max_logit", "core")) == tuple(name for name in FIELDS if name in {*core, "max_logit"})
    beside = {"model_update", "angle", "mean_abs", "mean_abs_change"}
    initial = {"grad_expected", "amplification", "amplification_gradient", "dependency"}
    assert set(besides(["all"])) == beside and set(FIELDS) - set(on_batch(["all"])) == beside | initial
    assert set(at_start(["all"])) == {*on_batch(["all"]), *initial, "angle"} - {"update_ratio", "update_rms"}


def test_rows_name_the_block_sublayer_and_site_of_every_number():
    """Two blocks: states 0..4, sublayers 1..4; block 0 is the embedding, and a final norm belongs to no block."""
    found = tidy(
        {
            "variance": np.arange(5) / 10,
            "branch_ratio": np.arange(1, 5) / 100,
            "norm_input": {"post": np.arange(1, 5) * 10, "embed": np.float32(5), "final": np.float32(50)},
            "grad_block": np.array([7.0, 8.0]),
            "max_logit": np.array([0.5, 0.25]),
            "log_z": np.float32(4.5),
            "angle": np.array([[0.0, 0.125, 0.75], [0.125, 0.0, 0.375], [0.75, 0.375, 0.0]]),
            "grad_matrix": {"q": np.array([1.5, 2.5]), "down": np.array([3.5, np.nan])},
        }
    )
    rows = list(zip(*(found[column] for column in COLUMNS), strict=True))
    assert rows[:-1] == [
        (0, 0, "embed", None, "variance", 0.0),
        (1, 1, "attention", None, "variance", 0.1),
        (1, 2, "ffn", None, "variance", 0.2),
        (2, 3, "attention", None, "variance", 0.3),
        (2, 4, "ffn", None, "variance", 0.4),
        (1, 1, "attention", None, "branch_ratio", 0.01),
        (1, 2, "ffn", None, "branch_ratio", 0.02),
        (2, 3, "attention", None, "branch_ratio", 0.03),
        (2, 4, "ffn", None, "branch_ratio", 0.04),
        (1, 1, "attention", "post", "norm_input", 10.0),
        (1, 2, "ffn", "post", "norm_input", 20.0),
        (2, 3, "attention", "post", "norm_input", 30.0),
        (2, 4, "ffn", "post", "norm_input", 40.0),
        (0, 0, "embed", "embed", "norm_input", 5.0),
        (None, None, "final", "final", "norm_input", 50.0),
        (1, None, None, None, "grad_block", 7.0),
        (2, None, None, None, "grad_block", 8.0),
        (1, None, "attention", None, "max_logit", 0.5),
        (2, None, "attention", None, "max_logit", 0.25),
        (None, None, None, None, "log_z", 4.5),
        (0, None, None, "+1", "angle", 0.125),
        (0, None, None, "+2", "angle", 0.75),
        (1, None, None, "+1", "angle", 0.375),
        (1, None, "attention", "q", "grad_matrix", 1.5),
        (2, None, "attention", "q", "grad_matrix", 2.5),
        (1, None, "ffn", "down", "grad_matrix", 3.5),
    ]
    assert rows[-1][:5] == (2, None, "ffn", "down", "grad_matrix") and np.isnan(rows[-1][5])


@pytest.mark.parametrize(
    ("grid", "steps", "expected"),
    [
        ("none", 10, ()),
        ("all", 3, (0, 1, 2)),
        ("log", 1, (0,)),
        ("log", 10, tuple(range(10))),
        ("log", 120, (0, 1, 2, *range(3, 120, 3), 4, 8, 16, 32, 64, 119)),
    ],
)
def test_steps_with_a_layer_record(grid: str, steps: int, expected: tuple[int, ...]):
    """0 and the powers of two, every ⌈steps/50⌉-th, the last; in order, each once."""
    assert probed_steps(grid, steps) == tuple(sorted(set(expected)))


def test_a_long_run_has_few_layer_records():
    found = probed_steps("log", 100_000)
    assert len(found) < 70 and {0, 1, 2, 65_536, 99_999} <= set(found) and max(np.diff(found)) <= 2000
