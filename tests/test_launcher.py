"""Workers: which runs share a process, and what a sweep is told of its jobs."""

import os
import signal
from dataclasses import replace

import pytest
from tiny import WORDS, tiny

import normflax
from hydra_plugins.normflax import launcher
from normflax import app
from normflax.build import static_part
from normflax.config import KEYS, change
from normflax.data.batches import Task
from normflax.sweep.identity import ELSEWHERE, TRACED, static_key

OTHER = {
    "placement": "post",
    "norm.kind": "rms",
    "norm.gain_form": "1+w",
    "model.ffn": "swiglu",
    "model.positions": "rope",
    "model.kv_heads": 1,
    "model.mask": "bidirectional",
    "model.dtype": "bfloat16",
    "model.dropout": 0.1,
    "data.parts": ["copy", "modk"],
    "data.weights": [0.5, 0.5],
    "model.init": "normal",
    "model.remat": "full",
    "data.name": "markov",
    "optim.name": "sgd",
    "schedule.name": "cosine",
    "probe.grid": "all",
    "probe.fields": ["peak"],
    "probe.every_step": ["variance"],
    "on_exists": "error",
    "data.path": "text",
    "data.seed": 7,
}


def other(key: str, value):
    """Another value of a setting."""
    if key in OTHER:
        return OTHER[key]
    return (
        (not value)
        if isinstance(value, bool)
        else 1.5
        if value is None
        else value + "x"
        if isinstance(value, str)
        else value * 2 + 1
    )


def static(config):
    """What compiles, for a task whose kind and size follow the settings as `batches.place` has them."""
    kinds = {"copy": Task("copy", config.data.vocab, config.data.lag), "markov": Task("markov", config.data.vocab)}
    return static_part(config, kinds[config.data.name])


@pytest.mark.parametrize("key", KEYS)
def test_runs_share_a_key_only_if_they_share_their_programs(key):
    """Sharing less is allowed (a key may tell apart what compiles alike), sharing more never."""
    one = tiny()
    group, _, leaf = key.rpartition(".")
    name = f"{group}__{leaf}" if group else leaf
    two = change(one, **{name: other(key, getattr(getattr(one, group), leaf) if group else getattr(one, leaf))})
    assert (static_key(one) == static_key(two)) == (key in TRACED | ELSEWHERE - {"data.path"})
    if static_key(one) == static_key(two):
        assert replace(static(one), windows=0) == replace(static(two), windows=0)
        assert static(one) == static(two)


def test_a_sweep_in_workers_trains_every_job(here, capsys):
    code = app.main(["-m", *WORDS, "hydra/launcher=normflax", "hydra.launcher.workers=2", "placement=post,pre", "seed=0,1"])
    assert code == 0, capsys.readouterr().err
    runs = normflax.load_table(here)
    assert len(runs) == 4 and set(runs["state"]) == {"finished"}
    before = {path: path.read_bytes() for path in here.rglob("status.json")}
    assert app.main(["-m", *WORDS, "hydra/launcher=normflax", "placement=post,pre", "seed=0,1"]) == 0
    assert {path: path.read_bytes() for path in here.rglob("status.json")} == before


def die(config):
    """A run that takes its process with it, or does nothing."""
    if config == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    if config == "broken":
        raise ValueError("no such thing")
    return os.getpid()


def test_a_worker_that_dies_costs_one_run(monkeypatch):
    from queue import SimpleQueue

    from normflax.sweep import job

    monkeypatch.setattr(job, "execute", die)
    queue, outcomes = SimpleQueue(), {}
    queue.put([0, 1, 2, 3, 4])
    launcher.serve(0, 1, queue, ["well", "deadly", "well", "broken", "well"], outcomes)
    assert isinstance(outcomes[1], Exception) and "terminated" in str(outcomes[1])
    assert isinstance(outcomes[3], ValueError) and str(outcomes[3]) == "no such thing"
    assert outcomes[0] != outcomes[2] == outcomes[4] != os.getpid()


def test_workers_share_the_cores_without_overlap(monkeypatch):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no processor affinity")
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(list(cores)))
    for worker in range(2):
        launcher.pin(worker, 2)
    assert taken == [[0, 2, 4], [1, 3]]
