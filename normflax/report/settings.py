"""docs/settings.md: every setting, from the declarations and comments of normflax/config.py and the files of configs/."""

import inspect
import re

import yaml

from normflax import config
from normflax.app import CONFIGS
from normflax.checks import CHOICES
from normflax.sweep.identity import TRACED

DECLARATION = re.compile(r"^    (?P<name>\w+): (?P<type>[^=]+?) = .+?(?:  # (?P<comment>.*))?$")


def comments() -> dict[str, str]:
    """What config.py says beside the declaration of each setting, by its key."""
    found = {}
    for group in ("", *config.GROUPS):
        kind = config.Config if not group else type(getattr(config.Config(), group))
        for line in inspect.getsource(kind).splitlines():
            match = DECLARATION.match(line)
            if match and f"{group}.{match['name']}".lstrip(".") in config.KEYS:
                found[f"{group}.{match['name']}".lstrip(".")] = match["comment"] or ""
    return found


def text(value: object) -> str:
    """A value as one types it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def meaning(key: str, comment: str) -> str:
    """The comment, with the choices of a setting first where it has a fixed list of them."""
    if key not in CHOICES:
        return comment
    options = " · ".join(f"`{choice}`" for choice in CHOICES[key] if choice is not None)
    rest = re.sub(r"^[\w |+]+\|[\w |+]*[:;]?\s*", "", comment)
    return f"{options}{': ' if rest else ''}{rest}"


def settings() -> str:
    """docs/settings.md"""
    said, defaults = comments(), config.flat(config.Config())
    lines = [
        "# Settings",
        "",
        "Written by `make docs` from `normflax/config.py`, `normflax/checks.py` and `configs/`. Write `key=value`; a comma is a",
        "sweep, with `-m`. Runs that differ only in keys marked ○ share one compiled program.",
    ]
    groups: dict[str, list[str]] = {}
    for key in config.KEYS:
        groups.setdefault(key.rpartition(".")[0], []).append(key)
    for group, keys in groups.items():
        lines += ["", f"## {f'`{group}.*`' if group else 'A run'}", "", "| key | default | | what |", "|---|---|---|---|"]
        for key in keys:
            mark = "○" if key in TRACED else ""
            said_of = meaning(key, said[key]).replace("<", "&lt;")
            lines.append(f"| `{key}` | `{text(defaults[key])}` | {mark} | {said_of} |".replace("  |", " |"))
        lines += choices(group)
    lines += ["", "## Experiments", "", *table("experiment"), ""]
    return "\n".join(lines)


def choices(group: str) -> list[str]:
    """The files of a config group, `group=name`, and what each sets."""
    return ["", f"Choices, `{group}=name`:", "", *table(group)] if group and (CONFIGS / group).is_dir() else []


def table(group: str) -> list[str]:
    """One row for every file of a group: its name, what its first comment says, and what it sets."""
    lines = ["| choice | sets | |", "|---|---|---|"]
    for path in sorted((CONFIGS / group).rglob("*.yaml")):
        source = path.read_text()
        said = " ".join(line.lstrip("# ") for line in source.splitlines() if line.startswith("#") and "@package" not in line)
        given = yaml.safe_load(source) or {}
        plain = {key: value for key, value in given.items() if not isinstance(value, dict) and key != "defaults"}
        sets = ", ".join(f"`{key}={text(value)}`" for key, value in plain.items())
        lines.append(f"| `{group}={path.relative_to(CONFIGS / group).with_suffix('').as_posix()}` | {sets} | {said} |")
    return lines
