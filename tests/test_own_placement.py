"""What a user's own placement may get wrong."""

import os
import subprocess
import sys

OWN: dict[str, tuple[str, ...]] = {
    'Placement(post=N, skip_from="y")': ("skip_from 'y'", "block"),
    'Placement(post="layer")': ("site 'post'", "'layer'"),
    "Placement(post=True)": ("site 'post'", "True"),
    'Placement(post=N, base="xavier")': ("base 'xavier'", "did you mean 'xavier_normal'"),
    'Placement(pre=Norm("rmss"), final=N)': ("norm 'rmss'", "did you mean 'rms'"),
    'Placement(post=N, skip=float("nan"))': ("no finite number",),
    'Placement(post=N, skip="two")': ("own_lab:mine", "two"),
    "Placement(post=N, skip=lambda *_: 1 / 0)": ("own_lab:mine", "ZeroDivisionError"),
    "no_such_thing": ("own_lab:mine", "NameError"),
}

TELL = """
import importlib, sys
from pathlib import Path
from normflax.config import Config, ConfigError, check
for entry in sys.stdin.read().splitlines():
    Path("own_lab.py").write_text("from normflax.model.placements import N, Norm, Placement\\nmine = " + entry)
    importlib.invalidate_caches()
    sys.modules.pop("own_lab", None)
    try:
        check(Config(placement="own_lab:mine"))
        print("taken")
    except ConfigError as error:
        print(error)
"""


def test_a_placement_of_ones_own_that_cant_be_is_one_sentence(tmp_path):
    """Told when settings are checked, before anything is compiled or written; in a process without the tests' type checks."""
    told = subprocess.run(
        [sys.executable, "-B", "-c", TELL],
        input="\n".join(OWN),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
    )
    said = told.stdout.splitlines()
    assert len(said) == len(OWN), told.stdout
    for entry, sentence in zip(OWN, said, strict=True):
        assert all(word in sentence for word in OWN[entry]), (entry, sentence)
