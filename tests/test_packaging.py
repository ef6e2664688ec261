"""What a clone and a wheel promise: the lock, the Python range, make's targets, where files go."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]


def locked() -> list[Requirement]:
    """The pins of the lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [Requirement(line.rstrip("\\ ")) for line in lines if line[0] not in "# "]


def test_the_lock_holds_names_versions_and_hashes_only():
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        pin = r"[a-z0-9-]+==[\w.]+( ; [a-z_]+ [<>=!]+ '[\w.]+'( (and|or) [a-z_]+ [<>=!]+ '[\w.]+')*)? \\"
        assert re.fullmatch(rf"#.*|{pin}|    --hash=sha256:[0-9a-f]{{64}}( \\)?", line), line
        assert "/" not in line, line


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_satisfies_every_declared_range(python):
    where = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    pins: dict[str, list[str]] = {}
    for pin in locked():
        if pin.marker is None or pin.marker.evaluate(where):
            pins.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    declared = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
    for requirement in declared:
        (version,) = pins[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{requirement} on Python {python}"
        assert {"<", ">="} == {bound.operator for bound in requirement.specifier}, f"{requirement} lacks a bound"


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Run make, as a user's shell would and not as a child of the make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_make_names_the_pythons_of_pyproject():
    (names,) = re.findall(r"^pythons := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert names.split() == PYTHONS


def test_another_python_gets_one_sentence_and_nothing_is_made(tmp_path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 3.10\n")
    python.chmod(0o755)
    refused = make("test", f"PYTHON={python}", f"VENV={tmp_path}/venv")
    assert refused.returncode != 0 and refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert all(word in line for word in [*PYTHONS, str(python), "is 3.10;", "make test PYTHON="]), line
    assert list(tmp_path.iterdir()) == [python]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_targets_that_pages_name_exist(page, tmp_path):
    command = r"(?:`|^ *(?:\$ )?)make ([a-z-]+(?: [a-z-]+)*)(?:`|$| +#| [A-Z]+=)"
    named = re.findall(command, (ROOT / page).read_text(), re.MULTILINE)
    targets = {target for line in named for target in line.split()}
    assert {"test"} <= targets
    ran = make("--dry-run", f"PYTHON={sys.executable}", f"VENV={tmp_path}/venv", *sorted(targets))
    assert ran.returncode == 0, ran.stderr


def test_the_wheel_keeps_configs_and_experiments_inside_the_package():
    inside = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {path.split("/")[0] for path in inside} == {"normflax", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in inside  # a namespace that other plugins share
    for folder in ("configs", "experiments"):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")}
        assert there and {f"normflax/{path}" for path in there} <= inside


def test_files_stay_short():
    long = {str(path): lines for path in ROOT.glob("normflax/**/*.py") if (lines := path.read_text().count("\n")) > 320}
    assert not long


def test_promotion_is_strict_here():
    with pytest.raises(ValueError, match="promotion"):
        jnp.zeros(2, jnp.float32) + jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
