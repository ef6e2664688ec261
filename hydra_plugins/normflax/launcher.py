"""A launcher that spends a machine's cores: one pinned process a core, each taking the runs of a compiled program in turn.

At the sizes of a laptop a step is as fast on one core as on two, so two processes do twice as much; and runs that differ only in
traced numbers stay in one process, which compiles once for all of them. Shells of jobs are replayed to Hydra, so folders,
callbacks and return values are as with any other launcher.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher


@dataclass
class WorkersConf:
    """`hydra.launcher.workers`: how many processes; null is one a core, and one where jax has an accelerator."""

    _target_: str = "hydra_plugins.normflax.launcher.WorkersLauncher"
    workers: int | None = None


ConfigStore.instance().store(group="hydra/launcher", name="normflax", node=WorkersConf, provider="normflax")


class WorkersLauncher(Launcher):
    """Runs the jobs of a sweep in worker processes, grouped by what they compile, the costliest group first."""

    def __init__(self, workers: int | None = None):
        self.workers = workers
        self.composed: dict[tuple[str, ...], Any] = {}  # jobs whose settings a sweeper has composed already
        self.config: Any = None
        self.hydra_context: Any = None

    def setup(self, *, hydra_context, task_function, config) -> None:
        """Called by Hydra before `launch`."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The jobs' returns in the order given; a job that failed carries its exception."""
        from normflax.config import resolve
        from normflax.sweep.identity import static_key

        load = self.hydra_context.config_loader.load_sweep_config
        composed = [self.composed.get(tuple(job)) or load(self.config, list(job)) for job in job_overrides]
        configs = [resolve(job) for job in composed]
        groups: dict[str, list[int]] = {}
        for number, config in enumerate(configs):
            groups.setdefault(static_key(config), []).append(number)
        queue: SimpleQueue[list[int]] = SimpleQueue()
        for group in sorted(groups.values(), key=lambda group: -len(group) * configs[group[0]].model.depth):
            queue.put(group)
        workers = min(self.workers or default_workers(), len(groups))
        outcomes: dict[int, Any] = {}
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(lambda worker: serve(worker, workers, queue, configs, outcomes), range(workers)))
        return [self._replay(job, initial_job_idx + number, outcomes[number]) for number, job in enumerate(composed)]

    def _replay(self, composed: Any, number: int, outcome: Any) -> JobReturn:
        """Hydra's own account of a job whose outcome is known: its value, or the exception that ended it."""
        from omegaconf import open_dict

        def task(_):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        return run_job(
            hydra_context=self.hydra_context,
            task_function=task,
            config=composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


def serve(worker: int, workers: int, queue: SimpleQueue, configs: Sequence[Any], outcomes: dict[int, Any]) -> None:
    """Run whole groups from the queue in one process, until there are none; a process that dies costs the run it was in."""
    from normflax.sweep.job import execute

    pool = None
    while True:
        try:
            group = queue.get_nowait()
        except Empty:
            break
        for number in group:
            pool = pool or ProcessPoolExecutor(1, get_context("spawn"), initializer=pin, initargs=(worker, workers))
            try:
                outcomes[number] = pool.submit(execute, configs[number]).result()
            except Exception as error:
                outcomes[number] = error
                if pool._broken:
                    pool = None
    if pool is not None:
        pool.shutdown()


def pin(worker: int, workers: int) -> None:
    """Give this process its share of the cores, before jax counts them. Linux only; elsewhere the system decides."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[worker::workers] or cores)


def default_workers() -> int:
    """One a core that this process may use; one in all where an accelerator's plugin is installed."""
    if any(find_spec(f"jax_{kind}_plugin") for kind in ("cuda12", "cuda13", "rocm7", "rocm60")):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
