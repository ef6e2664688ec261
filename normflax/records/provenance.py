"""Where a number comes from: versions, commit, device."""

import os
import platform
import socket
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import normflax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "hydra-core")


def versions() -> dict[str, str]:
    """Versions of Python, normflax and what its numbers rest on."""
    found = {"python": platform.python_version(), "normflax": normflax.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@lru_cache
def commit() -> str | None:
    """The commit of the checkout this code runs from, with `+changes` where tracked files differ from it; None when installed."""
    root = Path(normflax.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def process() -> dict[str, object]:
    """Who writes the run: so that another process can tell a run that goes on from one that was killed."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started(os.getpid())}


def alive(process: dict[str, object] | None) -> bool:
    """Whether that process is known to run on this machine."""
    if not process or process.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(str(process["pid"])), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return process.get("started") == started(int(str(process["pid"])))  # else the number has gone to another process


def started(pid: int) -> str | None:
    """When that process began, in the system's own words; None where it can't tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # ticks since the machine started
    except OSError:
        pass
    try:
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=True)
        return told.stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()
