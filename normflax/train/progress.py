"""What a person sees of a run while it trains, and in one line when it has ended."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

from normflax.config import Config


def title(config: Config) -> str:
    """The run in a few words."""
    return f"{config.placement} {config.model.depth}x{config.model.width} rate {config.optim.rate:g} seed {config.seed}"


@contextmanager
def shown(config: Config) -> Iterator[Callable[[int, dict], None]]:
    """A line that follows the run: loss, rate, tokens per second, time left. Nothing where stderr is not a terminal, nor in one of
    several workers that share it."""
    if not sys.stderr.isatty() or parent_process() is not None:
        yield lambda step, scalars: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[now]}"), TimeRemainingColumn())
    per_step = config.train.batch * config.train.tokens
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title(config), total=config.train.steps, now="compiling")
        begun: list[tuple[float, int]] = []

        def progress(step: int, scalars: dict) -> None:
            begun.append((time.perf_counter(), step))
            (t0, s0), (t1, s1) = begun[0], begun[-1]
            speed = f"{(s1 - s0) * per_step / (t1 - t0):,.0f} tokens/s" if s1 > s0 else ""
            now = f"step {step} loss {scalars['loss']:.3f} rate {scalars['rate']:.2g} {speed}"
            bar.update(task, completed=step + 1, now=now)

        yield progress


def line(config: Config, status: dict) -> str:
    """How a run ended."""
    took = status["timings"]["total"]
    if "initial" in status:
        models, loss = status["initial"]["seeds"], status["initial"]["loss"]
        size = f"{config.placement} {config.model.depth}x{config.model.width}"
        return f"{size} at initialisation: {models} models, loss {loss:.3f} nats per token, {took:.0f} s"
    heldout = status["heldout"]
    loss = f"{heldout['final']:.3f}" if math.isfinite(heldout["final"]) else str(heldout["final"])
    verdict = status["verdict"] + (f" at step {status['diverged_at']}" if status["diverged_at"] is not None else "")
    return f"{title(config)}: {verdict}, held-out loss {loss} ± {heldout['final_se']:.3f} nats per token, {took:.0f} s"
