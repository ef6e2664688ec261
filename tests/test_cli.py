"""The `normflax` command from end to end, on runs of a few steps."""

import sys

import pytest

import normflax
from normflax import cli

TINY = (
    "model.depth=2 model.width=8 model.heads=1 train.steps=6 train.batch=2 train.tokens=8"
    " data=markov data.vocab=8 data.windows=8 placement=post,pre seed=0,1"
).split()


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["normflax", *words])
    return cli.main()


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A folder with the runs, figures and claims of a tiny grid, and the exit code of making it."""
    folder = tmp_path_factory.mktemp("reproduced")
    code = cli.reproduce(["depth_stability", *TINY, f"results={folder}"])
    return folder / "depth_stability", code


def test_reproduce_trains_draws_and_judges(reproduced):
    folder, code = reproduced
    assert code == 0
    runs = normflax.load_table(folder)
    assert len(runs) == 4
    assert set(runs["state"]) == {"finished"}
    for figure in ("loss_against_depth", "gradient_by_block", "variance_by_block", "gradient_map", "variance_map"):
        for suffix in ("svg", "pdf", "png", "csv", "md"):
            assert (folder / "figures" / f"{figure}.{suffix}").stat().st_size > 100, (figure, suffix)
    claims = (folder / "figures" / "claims.csv").read_text()
    assert "sandwich_growth" in claims
    assert "not tested here" in claims  # there are no Sandwich-LN runs in this grid


def test_draw_again_changes_no_byte(reproduced):
    folder, _ = reproduced
    command = f"normflax train {' '.join(['experiment=depth_stability', *TINY, f'results={folder.parent}'])}"
    before = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert cli.draw("depth_stability", folder, command) == 0
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == before


def test_compare_ranks_and_draws(reproduced, monkeypatch, capsys):
    folder, _ = reproduced
    assert run(monkeypatch, "compare", str(folder)) == 0
    shown = capsys.readouterr().out
    assert "post" in shown
    assert "pre" in shown
    assert (folder / "figures" / "comparison.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["reproduc"], "did you mean 'reproduce'?"),
        (["reproduce", "depth_stabilty"], "did you mean 'depth_stability'?"),
        (["reproduce", "depth_stability", "--preset", "quik"], "did you mean 'quick'?"),
        (["compare", "no/such/folder"], "no folder 'no/such/folder'"),
        (["reproduce", "depth_stability", "model.dept=2"], "did you mean 'model.depth'?"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(monkeypatch, capsys, tmp_path, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_lists_the_commands(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"normflax {command}" in shown for command in ("train", *cli.COMMANDS))
