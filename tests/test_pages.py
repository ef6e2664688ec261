"""Equations, diagrams and reference pages derived from the tables."""

from pathlib import Path

import pytest

from normflax.config import KEYS
from normflax.model.equations import diagram, equation
from normflax.model.placements import PLACEMENTS, N, Placement
from normflax.probes.fields import FIELDS
from normflax.report.pages import PAGES
from normflax.report.settings import comments

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (PLACEMENTS["post"], "x' = N(x + F(x))"),
        (PLACEMENTS["pre"], "x' = x + F(N(x))"),
        (PLACEMENTS["sandwich"], "x' = x + N(F(N(x)))"),
        (PLACEMENTS["deepnorm"], "x' = N(a·x + F(x))"),
        (Placement(pre=N, final=N, skip_from="u", skip=2.0, branch=0.5), "x' = 2·N(x) + 0.5·F(N(x))"),
        (Placement(pre=N, final=N, skip_from="block"), "x' = x_l + F(N(x))"),
    ],
)
def test_equation(entry, text):
    assert equation(entry) == text


def test_diagram_draws_the_skip_from_where_it_is_taken():
    assert diagram(PLACEMENTS["deepnorm"]) == "x ─┬─ F ─(+) ─ N ─ x'\n   └─ ·a ──┘"
    first, second = diagram(Placement(pre=N, final=N, skip_from="u")).split("\n")
    assert first == "x ─ N ─┬─ F ─(+) ─ x'"
    assert second.index("└") == first.index("┬")
    assert second.index("┘") == first.index("+")


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_current(name):
    assert (ROOT / name).read_text() == PAGES[name](), "run `make docs`"


def test_pages_leave_nothing_out():
    assert all(f"`{name}`" in PAGES["docs/placements.md"]() for name in PLACEMENTS)
    assert all(f"`{name}`" in PAGES["docs/probes.md"]() for name in FIELDS)
    page = PAGES["docs/settings.md"]()
    assert all(f"| `{key}` | `" in page for key in KEYS)
    assert all(f"`{path.parent.name}={path.stem}`" in page for path in (ROOT / "configs").glob("*/*.yaml"))


def test_a_setting_is_explained_by_what_config_py_says_beside_it():
    page = PAGES["docs/settings.md"]()
    assert "| `optim.clip` | `null` | ○ | global gradient norm |" in page
    assert "| `model.remat` | `dots` | | `dots` · `full` · `none`: what the backward pass computes again |" in page
    assert "| `model=thousand` | `depth=1000`, `width=32`, `heads=2`, `remat=full` |" in page
    assert len(comments()) == len(KEYS)
