"""A run's folder is named after everything that can change its numbers, and after nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

from normflax.config import KEYS, Config, Data, check
from normflax.sweep.identity import ELSEWHERE, run_folder, run_id, slug

OTHER = {
    "placement": "post",
    "seed": 1,
    "norm.kind": "rms",
    "norm.eps": 1e-5,
    "norm.scale": False,
    "norm.bias": False,
    "norm.gain_form": "1+w",
    "norm.gain": 0.5,
    "coef.alpha": 1.0,
    "coef.beta": 1.0,
    "coef.gain": 1.0,
    "coef.qk_gain": 0.0,
    "model.depth": 3,
    "model.width": 16,
    "model.heads": 4,
    "model.kv_heads": 1,
    "model.qk_norm": True,
    "model.mask": "bidirectional",
    "model.residual_scaling": True,
    "model.embed_scale": 2.0,
    "model.embed_norm": True,
    "model.dropout": 0.1,
    "model.dtype": "bfloat16",
    "model.ffn": "swiglu",
    "model.ffn_ratio": 2.0,
    "model.positions": "rope",
    "model.bias": False,
    "model.tied": True,
    "model.fused_qkv": False,
    "model.init": "normal",
    "model.init_std": 0.03,
    "model.embed_std": 0.02,
    "model.position_std": 0.03,
    "model.remat": "none",
    "data.name": "markov",
    "data.path": "text",
    "data.heldout": 0.2,
    "data.windows": 5,
    "data.vocab": 9,
    "data.lag": 2,
    "data.parts": ["copy", "modk"],
    "data.weights": [0.5, 0.5],
    "data.order": 2,
    "data.concentration": 0.4,
    "data.table_seed": 1,
    "data.seed": 1,
    "optim.name": "sgd",
    "optim.rate": 2e-3,
    "optim.decay": 0.1,
    "optim.beta1": 0.8,
    "optim.beta2": 0.9,
    "optim.eps": 1e-6,
    "optim.momentum": 0.9,
    "optim.memory": 0.7,
    "optim.update_clip": 2.0,
    "optim.clip": 1.0,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 1,
    "schedule.final": 0.1,
    "schedule.decay_share": 0.3,
    "schedule.start": 0.01,
    "train.steps": 4,
    "train.batch": 3,
    "train.tokens": 9,
    "train.accumulate": 2,
    "train.label_smoothing": 0.1,
    "train.z_loss": 1e-4,
    "probe.grid": "all",
    "probe.fields": ["peak"],
    "probe.every_step": ["peak"],
    "probe.seeds": 2,
    "name": "another",
    "results": "elsewhere",
    "on_exists": "overwrite",
    "fail_fast": True,
}


def test_there_is_another_value_for_every_setting():
    """A new setting is added here, and with it to one of the two tests below."""
    assert set(OTHER) == set(KEYS)


@pytest.mark.parametrize("key", [key for key in OTHER if key not in ELSEWHERE])
def test_a_setting_that_can_change_the_numbers_changes_the_run(key):
    name = key.replace(".", "__")
    base = tiny(optim__name="adamw") if key == "optim.decay" else tiny()
    other = tiny(**{"optim__name": base.optim.name, name: OTHER[key]})
    assert hash8(other) != hash8(base)


@pytest.mark.parametrize("key", sorted(ELSEWHERE))
def test_a_setting_that_says_where_or_when_changes_nothing(key):
    assert {"name", "results", "on_exists", "fail_fast", "data.path"} == ELSEWHERE
    assert run_id(tiny(**{key.replace(".", "__"): OTHER[key]})) == run_id(tiny())


def hash8(config: Config) -> str:
    return run_id(config)[-8:]


def test_the_name_is_what_a_person_looks_for_and_eight_digits():
    config = tiny(placement="deepnorm", optim__rate=3e-4, schedule__warmup_steps=2, seed=7)
    assert re.fullmatch(r"deepnorm-2x8-rate0\.0003-warm2-seed7-[0-9a-f]{8}", run_id(config))
    assert run_id(config) == run_id(config)
    assert run_folder(tiny(name="sweep", results="out")) == Path("out/sweep") / run_id(tiny())


@pytest.mark.parametrize(
    "placement", ["my_lab.norms:mine", "päckage:ß", "a/b:c d", "." * 80 + "x:y", "-" * 80 + ":z", "x" * 300 + ":mine"]
)
def test_the_name_is_one_that_every_file_system_and_shell_takes(placement):
    name = slug(tiny(placement=placement))
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,59}", name) and name.endswith("-2x8-rate0.001-warm0-seed0")


def test_every_length_of_a_placements_path_gives_a_visible_name():
    """It is cut to 60 characters from the left, where a dot would hide the folder and a dash look like a flag."""
    for length in range(1, 60):
        assert slug(tiny(placement=f"my_lab.{'norms-' * 5}.{'x' * length}:mine"))[0] not in ".-"


def test_text_makes_the_run_and_its_content_counts(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc" * 100)
    config = tiny(data=Data(name="files", path=str(path), windows=1))
    before = run_id(config)
    assert run_id(config) == before
    moved = path.rename(tmp_path / "same text.txt")
    assert run_id(tiny(data=Data(name="files", path=str(moved), windows=1))) == before
    path.write_bytes(b"abd" * 100)
    assert run_id(config) != before


# ── A user's own placement ──────────────────────────────────────────────────────────────────────────────────────────

HEAD = """
from normflax.model.placements import N, Norm, Placement

def a(kind, block, depths):
    return 1.5 * block

roles = ("q", "k", "v", "out", "up", "down")
"""
BASE = "mine = Placement(post=N, skip=2.0, gain=dict.fromkeys(roles, 0.5))"
EDITS = {
    "site": "mine = Placement(pre=N, post=N, skip=2.0, gain=dict.fromkeys(roles, 0.5))",
    "embed": "mine = Placement(post=N, embed=N, skip=2.0, gain=dict.fromkeys(roles, 0.5))",
    "final": "mine = Placement(post=N, final=N, skip=2.0, gain=dict.fromkeys(roles, 0.5))",
    "kind of one site": "mine = Placement(post=Norm('rms'), skip=2.0, gain=dict.fromkeys(roles, 0.5))",
    "skip scale": "mine = Placement(post=N, skip=2.5, gain=dict.fromkeys(roles, 0.5))",
    "skip scale by block": "mine = Placement(post=N, skip=a, gain=dict.fromkeys(roles, 0.5))",
    "branch scale": "mine = Placement(post=N, skip=2.0, branch=0.5, gain=dict.fromkeys(roles, 0.5))",
    "gain": "mine = Placement(post=N, skip=2.0, gain=dict.fromkeys(roles, 0.5) | {'up': 0.25})",
    "skip taken elsewhere": "mine = Placement(post=N, skip_from='block', skip=2.0, gain=dict.fromkeys(roles, 0.5))",
    "base": "mine = Placement(post=N, skip=2.0, base='normal', gain=dict.fromkeys(roles, 0.5))",
}


def own(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The run id when `text` declares the placement own_lab:mine."""
    folder.mkdir()
    (folder / "own_lab.py").write_text(HEAD + text)
    with monkeypatch.context() as context:
        context.syspath_prepend(str(folder))
        context.delitem(sys.modules, "own_lab", raising=False)
        found = run_id(check(tiny(placement="own_lab:mine")))
    sys.modules.pop("own_lab")
    return found


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_users_placement_is_another_run(monkeypatch, tmp_path, edit):
    base, edited = own(BASE, monkeypatch, tmp_path / "a"), own(EDITS[edit], monkeypatch, tmp_path / "b")
    assert base != edited and base[:-8] == edited[:-8]


def test_an_edit_that_changes_no_number_is_the_same_run(monkeypatch, tmp_path):
    """A label, a comment, and a scale that is written as a function."""
    same = "\n\n# mine\nmine = Placement(post=N, skip=lambda *_: 2.0, label='Mine', gain=dict.fromkeys(roles, 0.5))"
    assert own(BASE, monkeypatch, tmp_path / "a") == own(same, monkeypatch, tmp_path / "b")


# ── Processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_has_the_same_name_in_every_process_and_under_every_hash_seed():
    """And finding it needs no jax, so that a finished sweep is recognised at once."""
    script = (
        "import sys; from normflax.config import *; from normflax.sweep.identity import run_id\n"
        "c = change(Config(), placement='deepnorm', data=Data(name='markov', vocab=5), model__ffn='swiglu')\n"
        "print(run_id(c)); assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    names = set()
    for hash_seed in ("0", "1", "random"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names.add(done.stdout)
    assert len(names) == 1
