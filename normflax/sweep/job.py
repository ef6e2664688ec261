"""One job: find or make its run folder, train, and say in a line how it ended."""

import shutil
import sys
import time
import traceback
from pathlib import Path

from normflax.config import Config, ConfigError, to_yaml
from normflax.records import provenance, strict_json
from normflax.records.store import RunExistsError, RunFolder
from normflax.sweep.identity import run_folder


def execute(config: Config) -> float:
    """The effective held-out loss of `config`, trained now or found in its folder.

    Raises ConfigError when the folder holds a run and `on_exists=error`, or another process is training it.
    """
    path = run_folder(config)
    done = existing(path, config.on_exists)
    if done is None:
        done = fresh(config, path)
    return effective_loss(done)


def existing(path: Path, on_exists: str) -> dict | None:
    """The status of the finished run at `path`, if it is to be used; None when a run is to be made there.

    A run that did not finish is set aside under `.set-aside` beside it, so nothing that was written is lost.
    """
    if not path.exists():
        return None
    if on_exists == "error":
        raise ConfigError(f"on_exists=error and the run folder {path} exists")
    try:
        status = strict_json.read(path / "status.json")
    except (OSError, ValueError):
        status = {}
    process = status.get("process") or {}
    if status.get("state") == "running" and provenance.alive(process):
        raise ConfigError(f"process {process['pid']} is training {path} now")
    if status.get("state") == "running" and elsewhere(process) and recent(path) and on_exists != "overwrite":
        raise ConfigError(
            f"{path} was written to on '{process['host']}' in the last {RECENT // 60:.0f} minutes: if nothing trains it there,"
            " on_exists=overwrite runs it again"
        )
    if status.get("state") == "finished":
        if on_exists == "skip":
            note = ""
            if status.get("commit") != provenance.commit() or status.get("versions") != provenance.versions():
                note = f" (made by {made_by(status)}, this is {made_by(here())}; on_exists=overwrite runs it again)"
            print(f"done already: {path}{note}", flush=True)
            return status
        shutil.rmtree(path)
        return None
    if on_exists == "overwrite":
        shutil.rmtree(path)
        return None
    aside = path.parent / ".set-aside"
    aside.mkdir(exist_ok=True)
    number = 1 + max((int(old.suffix[1:]) for old in aside.glob(f"{path.name}.*")), default=-1)
    path.rename(aside / f"{path.name}.{number}")
    print(f"unfinished ({status.get('state', 'unreadable')}): {path} is set aside in {aside} and run again")
    return None


RECENT = 600.0
"""Seconds since the last row of a run on another machine after which it is taken for dead: whether it is can't be asked."""


def elsewhere(process: dict) -> bool:
    """Whether the process is one of another machine."""
    return "host" in process and process["host"] != provenance.process()["host"]


def recent(path: Path) -> bool:
    """Whether the run at `path` has been written to lately."""
    return any(time.time() - file.stat().st_mtime < RECENT for file in path.iterdir())


def fresh(config: Config, path: Path) -> dict:
    """Train `config` into a new folder at `path` and return its last status."""
    try:
        folder = RunFolder.create(path, process=provenance.process(), **here())
    except RunExistsError as error:
        raise ConfigError(f"{error}; another process made it just now") from None
    except OSError as error:
        raise ConfigError(f"results={config.results} can't be written to: {error.strerror} ({error.filename})") from None
    try:
        folder.write_config(to_yaml(config))
        from normflax.train.loop import train
        from normflax.train.progress import line, shown
        from normflax.train.untrained import read

        if config.train.steps:
            with shown(config) as progress:
                status = train(config, folder, progress)
        else:
            status = read(config, folder)
        folder.log(line(config, status))
        print(f"{line(config, status)}  {path}", flush=True)
        return status
    except KeyboardInterrupt:
        folder.finish("interrupted", reason="interrupted")
        raise
    except BaseException as error:
        folder.error(traceback.format_exc())
        folder.finish("failed", reason=f"{type(error).__name__}: {error}")
        if not isinstance(error, ConfigError):  # which the command line tells in one sentence
            print(f"failed: {type(error).__name__}: {error}  {path / 'error.txt'}", file=sys.stderr)
            error.add_note(f"recorded in {path / 'error.txt'}")
        raise


def effective_loss(status: dict) -> float:
    """min(final held-out loss, unigram level), and the level itself for a run that was not finite.

    Of a run of no updates it is the mean loss of its models.
    """
    if "initial" in status:
        return status["initial"]["loss"]
    from normflax.records.stability import Verdict
    from normflax.records.stability import effective_loss as effective

    heldout, levels = status["heldout"], status["levels"]
    return effective(Verdict(status["verdict"]), heldout=heldout["final"], unigram=levels["unigram"], l0=heldout["initial"])


def here() -> dict:
    """What code is running."""
    return {"versions": provenance.versions(), "commit": provenance.commit()}


def made_by(status: dict) -> str:
    """The version of the code behind a status, in a few words."""
    versions = status.get("versions", {})
    commit = (status.get("commit") or "")[:7] + ("+changes" if "+" in (status.get("commit") or "") else "")
    return " ".join(filter(None, [f"normflax {versions.get('normflax', '?')}", commit, f"jax {versions.get('jax', '?')}"]))
