"""The ledger of claims: as a page, and by `normflax claims`."""

import sys

import numpy as np
import pandas as pd
import pytest
from initial_tables import field, ladder, table
from played import python

from experiments import depth_stability, signal, warmup_sensitivity
from normflax import cli
from normflax.analysis.claims import NOT_REPRODUCED, NOT_TESTED, REPRODUCED, Claim, judge
from normflax.analysis.intervals import Measured
from normflax.records import table as records
from normflax.report.ledger import interval, markdown

ALL = [*depth_stability.CLAIMS, *signal.CLAIMS, *warmup_sensitivity.CLAIMS]
ONE = pd.DataFrame({"placement": ["pre"]})


def claims(*measured, **words):
    """The claims c0, c1, … that a number is at least 1, judged by these."""
    words = {"source": "Someone 2020", "sentence": "It holds", "statistic": "a number"} | words
    made = [Claim(f"c{i}", measure=lambda runs, layers, m=m: m, at_least=1.0, **words) for i, m in enumerate(measured)]
    return judge(made, ONE, pd.DataFrame())


def rows(page):
    """The cells of the table, less its head."""
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines]


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_claim_is_a_row_with_what_was_measured():
    page = markdown(claims(Measured(1.2345, 1.1, 1.3, 8), Measured(0.5, np.nan, np.nan, 1), None), "Claims of a thing")
    assert page.startswith("# Claims of a thing\n") and page.endswith("|\n") and "Remarks" not in page
    assert "1 reproduced, 1 not reproduced, 1 not tested here." in page
    assert rows(page) == [
        ["`c0` It holds", "a number", "≥ 1", "1.23 (1.1 to 1.3)", "8", "reproduced", "Someone 2020"],
        ["`c1` It holds", "a number", "≥ 1", "0.5", "1", "not reproduced", "Someone 2020"],
        ["`c2` It holds", "a number", "≥ 1", "", "", "not tested here", "Someone 2020"],
    ]


def test_pipes_and_line_breaks_stay_in_their_cell():
    page = markdown(claims(None, sentence="|x| is\n  small", statistic="max |q|", source="A | B"), "Claims")
    (row,) = [line for line in page.splitlines() if line.startswith("| `c0`")]
    assert row == "| `c0` \\|x\\| is small | max \\|q\\| | ≥ 1 |  |  | not tested here | A \\| B |"
    assert len(rows(page)[0]) == 7


def test_remarks_are_listed_below():
    page = markdown(claims(None, None, remark="Eight seeds are too few."), "Claims")
    assert page.endswith("\nRemarks:\n\n- `c0`: Eight seeds are too few.\n- `c1`: Eight seeds are too few.\n")


def test_a_value_that_is_no_number_is_shown_and_has_no_interval():
    (row,) = claims(Measured(float("nan"), float("nan"), float("nan"), 3)).to_dict("records")
    assert row["verdict"] == NOT_REPRODUCED and interval(row) == "nan"


# ── normflax claims ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ask(here, monkeypatch, capsys):
    """`normflax claims …`: exit code, stdout, stderr and the ledger as it was written, if it was."""

    def run(*words: str):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["normflax", "claims", *words])
        code = cli.main()
        shown = capsys.readouterr()
        where = here / "results" / "claims.csv"
        return code, shown.out, shown.err, pd.read_csv(where).set_index("id") if where.exists() else None

    return run


def results(here, monkeypatch, **tables):
    """Let the folders of these experiments hold these runs and layers."""
    for name in tables:
        (here / "results" / name).mkdir(parents=True)
    monkeypatch.setattr(records, "load_table", lambda folder, rows="runs": tables[folder.name][rows == "layers"])


def level(power=0.0):
    """DeepNorm's gradient over the blocks of the deep stack, as a power of the block."""
    runs = ladder(("deepnorm",), (signal.DEPTH,))
    return runs, table(field(runs, "grad_block", lambda at, seed: at**power))


def test_without_results_nothing_is_tested(ask, here):
    code, out, error, ledger = ask()
    assert code == 0 and not error
    assert list(ledger.index) == [claim.id for claim in ALL] and set(ledger["verdict"]) == {NOT_TESTED}
    assert set(ledger["experiment"]) == {"depth_stability", "signal", "warmup_sensitivity"}
    page = (here / "results" / "claims.md").read_text(encoding="utf-8")
    assert f"{len(ALL)} not tested here." in page and [row[0].split("`")[1] for row in rows(page)] == list(ledger.index)
    assert "results/claims.md" in out and "results/claims.csv" in out and out.count("not tested here") >= len(ALL)


def test_folders_without_a_readable_run_test_nothing(ask, here):
    (here / "results" / "signal").mkdir(parents=True)
    lost = here / "results" / "depth_stability" / "lost"
    lost.mkdir(parents=True)
    (lost / "status.json").write_text('{"state": "fini')
    code, _, _, ledger = ask()
    assert code == 0 and set(ledger["verdict"]) == {NOT_TESTED} and len(ledger) == len(ALL)


def test_claims_are_judged_by_the_runs_of_their_experiment(ask, here, monkeypatch):
    results(here, monkeypatch, signal=level())
    code, out, _, ledger = ask()
    tested = ledger[ledger["verdict"] != NOT_TESTED]
    assert code == 0 and tested["verdict"].to_dict() == dict.fromkeys(
        ["signal_deepnorm_blocks", "signal_deepnorm_ends"], REPRODUCED
    )
    assert tested["value"].tolist() == pytest.approx([0, 1], abs=1e-6) and set(tested["seeds"]) == {2}
    assert "1 (1 to 1)" in out and "nan" not in out


def test_one_that_is_not_reproduced_is_exit_code_1(ask, here, monkeypatch):
    results(here, monkeypatch, signal=level(power=-0.5))
    code, _, error, ledger = ask()
    assert code == 1 and not error
    assert ledger.loc["signal_deepnorm_blocks", "verdict"] == NOT_REPRODUCED
    assert ledger.loc["signal_deepnorm_blocks", "value"] == pytest.approx(-0.5, abs=1e-6)
    assert f"{len(ALL) - 2} not tested here, 2 not reproduced." in (here / "results" / "claims.md").read_text(encoding="utf-8")
    assert ask("depth_stability")[0] == 0  # judged alone, another experiment does not fail for it


def test_named_experiments_are_shown_alone_and_the_ledger_is_whole(ask, here):
    code, _, _, ledger = ask("signal", "--results", "elsewhere")
    assert code == 0 and ledger is None and not (here / "results").exists()
    found = pd.read_csv(here / "elsewhere" / "claims.csv")
    assert list(found["id"]) == [claim.id for claim in ALL] and (here / "elsewhere" / "claims.md").exists()


def test_an_unknown_name_is_one_sentence_and_exit_code_2(ask, here):
    code, out, error, ledger = ask("signal", "signl")
    assert code == 2 and not out and ledger is None and not (here / "results").exists()
    assert "did you mean 'signal'?" in error and error.count("\n") == 1


def test_two_models_where_a_claim_has_one_are_a_sentence(ask, here, monkeypatch):
    (one, layers), (two, others) = level(), level(power=-0.5)
    results(here, monkeypatch, signal=(pd.concat([one, two.assign(**{"norm.kind": "rms"})]), table(layers, others)))
    code, _, error, ledger = ask()
    assert code == 2 and ledger is None and error.count("\n") == 1
    assert "results/signal" in error and one["run"][0] in error and two["run"][0] in error


def test_ids_are_of_one_claim_each():
    assert len({claim.id for claim in ALL}) == len(ALL)


def test_the_command_works_where_there_is_nothing(here):
    """In a Python of its own, as from the shell."""
    done = python("-m", "normflax", "claims", "signal", cwd=here)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (here / "results" / "claims.md").read_text(encoding="utf-8").count("not tested here") == len(ALL) + 1
