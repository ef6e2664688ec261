"""Hydra's own grid sweeper, except that every job is checked before the first one starts and none hides another's failure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus


@dataclass
class GridSweeperConf:
    """`hydra.sweeper`: `params` is the grid of an experiment, to which the command line adds and of which it replaces.

    `grids` are parts of a sweep that is no product: each, under any name, adds to `params` and replaces of them.
    """

    _target_: str = "hydra_plugins.normflax.sweeper.GridSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = field(default_factory=dict)
    grids: dict[str, dict[str, str]] | None = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="normflax", node=GridSweeperConf, provider="normflax")


class GridSweeper(BasicSweeper):
    """The product of all swept values of each grid, in one batch."""

    def __init__(self, max_batch_size: int | None, params: Any = None, grids: Any = None):
        super().__init__(max_batch_size, params)
        self.grids = grids or {"": {}}

    def sweep(self, arguments: list[str]) -> Any:
        """Check every job, write the grid down, launch, and report.

        Raises ConfigError before any job starts when one of them can't be, and JobsFailed after all when some failed.
        """
        from normflax.app import JobsFailed, check_words
        from normflax.config import resolve
        from normflax.data import sources

        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        loader = self.hydra_context.config_loader
        given = {
            name: [*self._parse_config(), *(f"{k}={v}" for k, v in grid.items()), *arguments] for name, grid in self.grids.items()
        }
        parser, composed = OverridesParser.create(config_loader=loader), {}
        jobs, configs = [], []
        for words in given.values():
            check_words(words)
            for job in self.split_arguments(parser.parse_overrides(words), None)[0]:
                composed[tuple(job)] = loader.load_sweep_config(self.config, list(job))
                config = resolve(composed[tuple(job)])
                if config not in configs:  # two grids may say the same in other words
                    jobs, configs = [*jobs, job], [*configs, config]
        for data in {repr(config.data): config.data for config in configs}.values():
            sources.load(data)  # so that text which is not there is missed now
        where = Path(configs[0].results) / configs[0].name
        for words in given.values():
            _write_grid(where, words)
        print(f"{len(jobs)} runs → {where}", flush=True)
        launcher: Any = self.launcher
        if hasattr(launcher, "composed"):
            launcher.composed = composed  # a job takes Hydra a tenth of a second to compose
        if configs[0].fail_fast:
            returns: list[JobReturn] = []
            for number, job in enumerate(jobs):
                returns += self.launcher.launch([job], initial_job_idx=number)
                if returns[-1].status is not JobStatus.COMPLETED:
                    break
        else:
            returns = list(self.launcher.launch(jobs, initial_job_idx=0))
        _draw(self.config, where, arguments)
        failed: list[tuple[Sequence[str], JobReturn]] = [
            (job, ret) for job, ret in zip(jobs, returns, strict=False) if ret.status is not JobStatus.COMPLETED
        ]
        if failed:
            raise JobsFailed(_report(failed, len(jobs), len(jobs) - len(returns)))
        return [returns]


def _draw(config: Any, folder: Path, arguments: Sequence[str]) -> None:
    """The figures, tables and claims of the experiment whose grid this was, if it was one's."""
    from normflax.cli import draw, experiments

    chosen = config.hydra.runtime.choices.get("experiment")
    name = str(chosen).split("/")[0]
    if chosen is not None and name in experiments():
        draw(name, folder, " ".join(["normflax train", *arguments]))


def _write_grid(folder: Path, given: Sequence[str]) -> None:
    """The grid's overrides under their own name, so that two grids in one folder keep both. Raises ConfigError."""
    from normflax.config import ConfigError

    name = hashlib.sha256("\n".join(sorted(given)).encode()).hexdigest()[:8]
    path = folder / "grids" / f"{name}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(given) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder} can't be written to: {error.strerror} ({error.filename})") from None


def _report(failed: list[tuple[Sequence[str], JobReturn]], jobs: int, left: int) -> str:
    """One line for every failed job."""
    lines = [f"{len(failed)} of {jobs} runs failed" + (f", {left} were not started (fail_fast)" if left else "") + ":"]
    for job, ret in failed:
        error = ret._return_value
        lines.append(f"  {' '.join(job)}: {type(error).__name__}: {' '.join(str(error).split())}")
    return "\n".join(lines)
