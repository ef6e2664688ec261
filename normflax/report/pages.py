"""Reference pages written from the tables they document."""

from normflax.model.equations import diagram, equation
from normflax.model.placements import KINDS, PLACEMENTS, Coefficient, Depths, norm_count, value
from normflax.probes.fields import FIELDS
from normflax.report.settings import settings

SHOWN_DEPTHS = (6, 24, 100, 1000)


def placements() -> str:
    """docs/placements.md"""
    lines = [
        "# Placements",
        "",
        "Written by `make docs` from `normflax/model/placements.py`. One sublayer with branch F (attention or FFN) and norm N:",
        "",
        "    u = pre(x)    y = out(F(c·u))    x' = post(a·skip + b·y)",
        "",
        "| placement | name | equation | norms before the head | norms in 3 blocks | base init | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in PLACEMENTS.items():
        ends = "embedding, final" if entry.embed and entry.final else "final" if entry.final else "none of its own"
        lines.append(
            f"| `{name}` | {entry.label} | `{equation(entry)}` | {ends} | {norm_count(entry, Depths(decoder=3))} | "
            f"{entry.base or 'any (default `xavier_normal`)'} | {entry.source} |"
        )
    for name, entry in PLACEMENTS.items():
        lines += ["", f"## {entry.label} (`placement={name}`)", "", "```", diagram(entry), "```"]
        constants = depth_constants(name)
        if constants:
            lines += ["", *constants]
    lines += [
        "",
        "## Your own",
        "",
        "A placement is data in a file of yours, named by its import path; every probe, sweep and figure works with it:",
        "",
        "```python",
        "# my_lab.py",
        "from normflax.model.placements import N, Placement",
        "",
        'half_post = Placement(post=N, branch=0.5, label="Half Post-LN")',
        "```",
        "",
        "`python -m experiments.train placement=my_lab:half_post model.depth=24`",
        "",
    ]
    return "\n".join(lines)


def depth_constants(name: str) -> list[str]:
    """A table of the entry's numbers that depend on depth, empty where none do: of the first block, and of the last where it
    has another."""
    entry = PLACEMENTS[name]
    gains: dict[Coefficient, list[str]] = {}
    for role, gain in (entry.gain or {}).items():
        gains.setdefault(gain, []).append(role)
    moving = {"skip scale a": entry.skip, "branch scale b": entry.branch, "input scale c": entry.input}
    moving |= {f"initial gain of {', '.join(roles)}": gain for gain, roles in gains.items()}
    moving = {what: coefficient for what, coefficient in moving.items() if callable(coefficient)}
    if not moving:
        return []
    lines = [
        f"| decoder of | {' | '.join(f'{depth} blocks' for depth in SHOWN_DEPTHS)} |",
        "|---" * (len(SHOWN_DEPTHS) + 1) + "|",
    ]
    for what, coefficient in moving.items():
        lines.append(f"| {what} | {' | '.join(ends(coefficient, depth) for depth in SHOWN_DEPTHS)} |")
    return lines


def ends(coefficient: Coefficient, depth: int) -> str:
    """A coefficient in the first block of a decoder, and in the last where it is another number."""
    first, last = (f"{value(coefficient, KINDS[0], block, Depths(decoder=depth)):.6f}" for block in (1, depth))
    return first if first == last else f"{first} … {last}"


AXES = {
    "state": "the S + 1 states of the stream (0 is the embedding's output)",
    "sublayer": "the S sublayers",
    "norm": "every norm layer of the stream",
    "matrix": "every block and role (q, k, v, out, up, gate, down)",
    "block": "the L blocks",
    "attention": "the attention of every block",
    "model": "the model",
    "pair": "every two of the L + 1 block inputs",
    "part": "every sublayer and each part of the state after it",
}


READ = {"step": "on a step's batch", "update": "on the update", "beside": "on held-out windows", "initial": "at `initial`"}


def probes() -> str:
    """docs/probes.md"""
    lines = [
        "# Probes",
        "",
        "Written by `make docs` from `normflax/probes/fields.py`. A decoder of L blocks has S = 2·L sublayers.",
        "",
        "The clock is the same for every field: step t reads the parameters after t updates, on the batch of update t, before that",
        "update. Gradients are those of what is minimised, a mean over valid targets, before clipping. Probes change no number",
        "of a run. `probe.fields=[core]`, the default, records those marked ●, `[all]` every one, `[core,max_logit]` what is",
        "named.",
        "Fields read at `initial` are those of models that have made no update, `train.steps=0`: there `probe.seeds=8` reads eight",
        "seeds in one program on one batch, and a column `theory` of the layer rows holds what theory expects.",
        "The cost is what reading a field adds to a step that reads it (24 blocks of width 64, 16 x 128 tokens, 2 cores, 21 rounds",
        "in turn with the plain step; that step against itself: 0.2 %). All core fields together add 5 %.",
        "",
        "| field | | metric | symbol | one value for | read | unit | definition | cost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, field in FIELDS.items():
        symbol = field.symbol.replace("|", "\\|")
        definition, mark = field.definition.replace("|", "\\|"), "●" if field.core else ""
        lines.append(
            f"| `{name}` | {mark} | {field.metric} | {symbol} | {AXES[field.axis]} | {READ[field.when]} | {field.unit} |"
            f" {definition} | {field.cost if field.when != 'initial' else ''} |"
        )
    lines += [
        "",
        "Beside them `scalars.jsonl` has a line for every step: `loss` (the cross-entropy, also where label smoothing or a z-loss",
        "is minimised with it), `rate` (the one this update used), `grad_norm` (all parameters, before clipping),",
        "`grad_norm_matrices` (the branch matrices alone, M09), `valid` (targets in the batch) and `skipped` (1 where the update",
        "was not finite and was not made). `status.json` says how often loss and gradient norm spiked (M27): the share of steps at",
        "least 7 standard deviations above the mean of the min(1000, max(50, steps/10)) before them, and which steps they were.",
        "",
    ]
    return "\n".join(lines)


PAGES = {"docs/placements.md": placements, "docs/probes.md": probes, "docs/settings.md": settings}
