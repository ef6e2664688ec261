"""Settings: every default can run, every mistake is one sentence that names the key, and YAML keeps the types."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import yaml
from tiny import tiny

from normflax import config as settings
from normflax.app import CONFIGS
from normflax.checks import AT_LEAST, CHOICES
from normflax.config import GROUPS, KEYS, Config, ConfigError, change, check, flat, to_yaml


def kind(key: str) -> str:
    """The declared type of a setting, as text."""
    group, _, leaf = key.rpartition(".")
    owner = type(getattr(Config(), group)) if group else Config
    return str(owner.__annotations__[leaf])


def refused(**changes) -> str:
    """The one sentence with which these settings are refused."""
    with pytest.raises(ConfigError) as error:
        check(tiny(**changes))
    sentence = str(error.value)
    assert "\n" not in sentence and sentence
    return sentence


def test_the_defaults_can_run():
    assert check(Config()) == Config()
    assert check(tiny()) == tiny()


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.depth = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_change_copies():
    base = Config()
    other = change(base, seed=3, model__depth=7, model__width=32)
    assert (other.seed, other.model.depth, other.model.width) == (3, 7, 32)
    assert base == Config() and change(other, seed=0, model__depth=12, model__width=64) == base
    with pytest.raises(TypeError):
        change(base, model__dept=1)


def test_keys_are_dotted_leaves():
    assert flat(Config())["model.depth"] == 12 and "model" not in KEYS and "model" in GROUPS
    assert len(KEYS) == len(set(KEYS)) and set(KEYS) & set(GROUPS) == set()
    assert flat(tiny(optim__rate=0.5))["optim.rate"] == 0.5


def test_every_checked_key_exists():
    assert set(CHOICES) <= set(KEYS) and set(AT_LEAST) <= set(KEYS)


# ── What is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", CHOICES)
def test_a_word_that_is_no_choice_is_refused_with_all_of_them_and_the_nearest(key):
    nearest = next(word for word in CHOICES[key] if word is not None)
    sentence = refused(**{key.replace(".", "__"): nearest + "x"})
    assert key in sentence and f"'{nearest}x'" in sentence
    assert all(str(word) in sentence for word in CHOICES[key] if word is not None)
    assert f"did you mean '{nearest}'?" in sentence or nearest == "w"  # too short to have a neighbour


@pytest.mark.parametrize("key", AT_LEAST)
def test_a_number_below_its_least_is_refused(key):
    name, least = key.replace(".", "__"), AT_LEAST[key]
    if "float" in kind(key):
        assert f"{key}={least - 0.5} is too small: it is at least {least}" in refused(**{name: least - 0.5})
        assert f"{key}=nan" in refused(**{name: math.nan})
    else:
        assert f"{key}={least - 1} is too small: it is at least {least}" in refused(**{name: least - 1})


def test_an_unknown_placement_is_refused_with_the_nearest():
    """An import path is named as the other way there is."""
    sentence = refused(placement="pree")
    assert "placement 'pree' is unknown" in sentence and "did you mean 'pre'?" in sentence
    assert all(word in sentence for word in ("post", "pre", "sandwich", "deepnorm", "package.module:name"))


def test_a_users_placement_that_cant_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_lab.py").write_text(
        "from normflax.model.placements import N, Placement\n"
        "number = 3\n"
        "half = Placement(post=N, gain={'v': 0.5, 'out': 0.5, 'up': 0.5})\n"
    )
    assert "broken_lab:missing" in refused(placement="broken_lab:missing")
    assert "can't be imported" in refused(placement="no_such_lab:mine")
    assert "is int, not a normflax Placement" in refused(placement="broken_lab:number")
    assert "none for role 'q'" in refused(placement="broken_lab:half")
    sys.modules.pop("broken_lab")


@pytest.mark.parametrize("where", ["skip", "branch", "gain"])
def test_a_users_coefficient_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """Before any run starts, and not as a traceback in the middle of a sweep."""
    monkeypatch.syspath_prepend(str(tmp_path))
    given = "dict.fromkeys(('q', 'k', 'v', 'out', 'up', 'down', 'gate'), bad)" if where == "gain" else "bad"
    (tmp_path / f"failing_{where}.py").write_text(
        "from normflax.model.placements import N, Placement\n"
        "def bad(kind, block, depths):\n    return 1 / (block - 2)\n"
        f"mine = Placement(post=N, {where}={given})\n"
    )
    assert check(tiny(placement=f"failing_{where}:mine", model__depth=1))
    sentence = refused(placement=f"failing_{where}:mine", model__depth=2)
    assert f"failing_{where}:mine" in sentence and "division" in sentence
    sys.modules.pop(f"failing_{where}")


def test_a_warm_up_that_is_not_below_the_total_is_refused():
    """A-16: one sentence with both keys."""
    for warmup, steps in ((100, 100), (100, 50), (1, 1)):
        sentence = refused(schedule__warmup_steps=warmup, train__steps=steps)
        assert f"schedule.warmup_steps={warmup}" in sentence and f"train.steps={steps}" in sentence
    assert check(tiny(schedule__warmup_steps=99, train__steps=100))
    assert check(tiny(schedule__warmup_steps=0, train__steps=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__heads": 3}, ("model.heads=3", "model.width=8")),
        ({"model__heads": 8, "model__positions": "rope"}, ("model.positions=rope", "odd")),
        ({"schedule__final": 1.5}, ("schedule.final=1.5",)),
        ({"schedule__final": -0.1}, ("schedule.final=-0.1",)),
        ({"optim__name": "adam", "optim__decay": 0.1}, ("optim.decay=0.1", "adamw")),
        ({"data__name": "files"}, ("data.path",)),
        ({"data__heldout": 0.0}, ("data.heldout=0.0",)),
        ({"data__heldout": 1.0}, ("data.heldout=1.0",)),
        ({"data__lag": 8}, ("data.lag=8", "train.tokens=8")),
        ({"seed": 2**32}, ("seed", "2**32")),
        ({"data__seed": 2**32}, ("data.seed", "2**32")),
        ({"probe__fields": ["variances"]}, ("probe.fields", "'variances'", "did you mean 'variance'?")),
        ({"probe__every_step": ["peek"]}, ("probe.every_step", "'peek'", "did you mean 'peak'?")),
        ({"model__ffn_ratio": 0.0}, ("model.ffn_ratio",)),
        ({"model__ffn_ratio": -1.0}, ("model.ffn_ratio",)),
        ({"optim__beta1": 1.0}, ("optim.beta1",)),
        ({"optim__beta2": 1.5}, ("optim.beta2",)),
        ({"optim__eps": -1e-8}, ("optim.eps",)),
        ({"data__name": "markov", "data__concentration": 0.0}, ("data.concentration",)),
        ({"name": ""}, ("name",)),
        ({"name": "x" * 256}, ("name",)),
        ({"name": "../elsewhere"}, ("name",)),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, dict) else "",
)
def test_what_does_not_fit_together_is_refused(changes, words):
    sentence = refused(**changes)
    assert all(word in sentence for word in words), sentence


def test_what_does_fit_together_is_not():
    assert check(tiny(model__heads=4, model__positions="rope"))
    assert check(tiny(optim__name="adamw", optim__decay=0.1)) and check(tiny(optim__name="sgd", optim__decay=0.1))
    assert check(tiny(optim__clip=None)) and check(tiny(optim__clip=0.5))
    assert check(tiny(data__name="markov", data__lag=99))  # the lag is of the copy task
    assert check(tiny(seed=2**32 - 1, probe__fields=["all"], probe__every_step=["peak", "variance"]))
    assert check(tiny(name="my/sweep of things"))


def test_an_unknown_key_is_told_with_the_nearest():
    assert settings.unknown_key("model.dept") == "there is no setting 'model.dept'; did you mean 'model.depth'?"
    assert settings.unknown_key("qqq.zzz") == "there is no setting 'qqq.zzz'"


# ── The lists of choices are the tables ─────────────────────────────────────────────────────────────────────────────


def test_every_choice_is_implemented_and_every_implementation_can_be_chosen():
    from normflax.data import sources
    from normflax.model import init, norms, placements, stack

    tables = {
        "norm.kind": norms.NORMS,
        "model.ffn": placements.FFN_ROLES,
        "model.remat": stack.REMAT,
        "data.name": sources.NAMES,
    }
    for key, table in tables.items():
        assert set(CHOICES[key]) == set(table), key
    assert set(CHOICES["model.init"]) - {None} == set(init.DRAWS)


@pytest.mark.parametrize("group", ["data", "norm", "optim", "schedule"])
def test_a_groups_files_are_its_choices_and_set_only_what_there_is(group):
    key = {"norm": "kind"}.get(group, "name")
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (CONFIGS / group).glob("*.yaml")}
    assert set(files) == set(CHOICES[f"{group}.{key}"])
    for name, given in files.items():
        assert given[key] == name
        assert {f"{group}.{field}" for field in given} <= set(KEYS)
        assert check(tiny(**{f"{group}__{field}": value for field, value in given.items()}, data__path="x"))


@pytest.mark.parametrize("path", sorted((CONFIGS / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_model_of_the_group_is_one_that_can_be(path):
    given = yaml.safe_load(path.read_text())
    assert {"depth", "width", "heads"} <= given.keys() and check(tiny(**{f"model__{key}": value for key, value in given.items()}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__ffn_ratio": float("inf")}, ("model.ffn_ratio=inf",)),
        ({"coef__alpha": float("nan")}, ("coef.alpha=nan",)),
        ({"norm__gain": float("nan")}, ("norm.gain=nan",)),
        ({"model__embed_scale": float("inf")}, ("model.embed_scale=inf",)),
        ({"train__steps": 3_000_000_000}, ("train.steps=3000000000", "2**31")),
        ({"seed": 2**32}, ("seed=4294967296", "2**32")),
        ({"optim__eps": 0.0}, ("optim.eps=0.0", "optim.name=adam")),
        ({"data__windows": 1}, ("data.windows=1", "at least 2")),
    ],
)
def test_a_number_that_no_run_can_have_is_one_sentence(changes, words):
    with pytest.raises(ConfigError) as caught:
        check(tiny(**changes))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


# ── YAML ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_saved_settings_read_back_by_any_reader_with_their_types():
    """A-25: YAML 1.1 takes `1e-3` for text; None stays null and never becomes a word."""
    config = tiny(optim__rate=1e-3, optim__eps=1e-8, norm__eps=3e-7, model__depth=7, probe__fields=["peak", "variance"])
    read = yaml.safe_load(to_yaml(config))

    def leaves(tree, prefix=""):
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    assert dict(leaves(read)) == flat(config)
    assert all(type(value) is type(flat(config)[key]) for key, value in leaves(read))
    assert read["optim"]["rate"] == 0.001 and isinstance(read["optim"]["rate"], float)
    assert read["optim"]["clip"] is None and read["data"]["seed"] is None
