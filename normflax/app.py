"""The Hydra app behind `python -m experiments.train` and `normflax train`.

No jax at import: help, and everything that is wrong with a config, is answered before it loads.
"""

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode

from normflax import config as settings
from normflax.nearest import unknown

PACKAGE = Path(__file__).parent


def folder_of(name: str) -> Path:
    """`configs` or `experiments`: inside the installed package, or beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


CONFIGS = folder_of("configs")


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def app(composed: Any) -> float:
    """One run; its effective held-out loss is the value that Hydra's sweepers see."""
    from normflax.sweep.job import execute

    try:
        return execute(settings.resolve(composed))
    except settings.ConfigError as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise
        raise SystemExit(_say(error)) from None  # an exception proper would be announced by Hydra first
    except Exception as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise
        if not hasattr(error, "__notes__"):  # else the run that failed has said so, and its error.txt holds the traceback
            traceback.print_exc()
        raise SystemExit(1) from None


def main(arguments: list[str] | None = None) -> int:
    """Run the app on `arguments` (default: the command line) and return its exit code.

    0 done · 1 a run failed · 2 a setting can't be, told in one sentence before anything runs · 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Hydra then raises what it would otherwise print as a page of traceback.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a user's own placement lies where they work
    settings.register()
    before = sys.argv
    try:
        flags, words = split(arguments)
        check_words(words)
        sys.argv = [sys.argv[0], *flags, *words]
        with warnings.catch_warnings():
            # `-m` on top of an experiment that is a sweep already is no mistake.
            warnings.filterwarnings("ignore", message=".*overriding with `hydra.mode=MULTIRUN`.*")
            app()
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept", file=sys.stderr)
        return 130
    except JobsFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:
        mistake = settings.mistake(error)
        if mistake is not None:
            return _say(mistake)
        traceback.print_exc()
        return 1
    finally:
        sys.argv = before
    return 0


class JobsFailed(Exception):
    """Some runs of a sweep failed; the message is the table of them."""


def _say(message: object) -> int:
    print(f"normflax: {message}", file=sys.stderr)
    return 2


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides, in whatever order they came. Raises ConfigError for another flag."""
    known, others = get_args_parser().parse_known_intermixed_args(arguments)
    if others:
        raise settings.ConfigError(f"'{others[0]}' is no flag: settings are key=value, and --help lists them")
    return [word for word in arguments if word not in known.overrides], known.overrides


def check_words(words: list[str]) -> None:
    """Refuse an override of a setting that does not exist, also with `+`, and a choice that a group does not have.

    Hydra would add whatever `+` names, and tells of the rest in its own words. Raises ConfigError.
    """
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise settings.ConfigError(f"'{word}' is no override: write key=value")
    for override in map(parsed, words):
        key = override.key_or_group
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            continue
        if override.is_delete():
            raise settings.ConfigError(f"'{override.input_line}' would delete a setting that every run needs")
        group = CONFIGS / key
        if key in settings.GROUPS and (not group.is_dir() or isinstance(override.value(), dict)):
            members = ", ".join(member for member in settings.KEYS if member.startswith(f"{key}."))
            raise settings.ConfigError(f"'{key}' is a group of settings; set one of {members}")
        if group.is_dir():
            allowed = sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))
            for choice in choices(override):
                if choice not in allowed and choice not in ("null", "None"):
                    raise settings.ConfigError(unknown(key, choice, allowed))
        elif key not in settings.KEYS:
            raise settings.ConfigError(settings.unknown_key(key))


def parsed(word: str) -> Override:
    """One override. Raises ConfigError where its syntax is broken."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise settings.ConfigError(f"'{word}' can't be read: {str(error).splitlines()[0]}") from None


def choices(override: Override) -> list[str]:
    """The values that an override gives, one or a sweep of them, as text."""
    if override.is_sweep_override():
        return [str(value).strip("'\"") for value in override.sweep_string_iterator()]
    return [str(override.value())]
