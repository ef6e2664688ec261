"""What was measured, as tidy rows: one value each, with its place in the model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from normflax.model.placements import KINDS
from normflax.probes.fields import FIELDS

ROLE_BRANCH = {
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "out": "attention",
    "up": "ffn",
    "gate": "ffn",
    "down": "ffn",
}

COLUMNS = ("block", "sublayer", "branch", "site", "field", "value")


def tidy(measured: Mapping[str, Any]) -> dict[str, list]:
    """What a probed step returned, as columns of tidy rows (see COLUMNS).

    `measured` maps fields to [S + 1] (state), [S] (sublayer), [L] (block, attention), [] (model), [L + 1, L + 1] (pair),
    [S, S + 1] (part) or dicts of them: by site for norms ([S], or a number for `embed` and `final`), by role for matrices ([L]).
    Blocks count from 1; the embedding is block 0, sublayer 0.
    """
    columns: dict[str, list] = {name: [] for name in COLUMNS}

    def add(field, value, block, sublayer, branch, site):
        for name, cell in zip(COLUMNS, (block, sublayer, branch, site, field, float(value)), strict=True):
            columns[name].append(cell)

    def along_sublayers(field, values, first, site=None):
        for sublayer, value in enumerate(np.asarray(values), start=first):
            block, branch = (0, "embed") if sublayer == 0 else ((sublayer + 1) // 2, KINDS[(sublayer - 1) % 2])
            add(field, value, block, sublayer, branch, site)

    for name, found in measured.items():
        axis = FIELDS[name].axis
        if axis in ("state", "sublayer"):
            along_sublayers(name, found, 0 if axis == "state" else 1)
        elif axis in ("block", "attention"):
            for block, value in enumerate(np.asarray(found), start=1):
                add(name, value, block, None, "attention" if axis == "attention" else None, None)
        elif axis == "model":
            add(name, found, None, None, None, None)
        elif axis == "pair":
            for lower, upper in zip(*np.triu_indices(len(found), 1), strict=True):
                add(name, found[lower, upper], int(lower), None, None, f"+{upper - lower}")
        elif axis == "part":
            for sublayer, row in enumerate(np.asarray(found), start=1):
                for part, value in enumerate(row[: sublayer + 1]):
                    add(name, value, (sublayer + 1) // 2, sublayer, KINDS[(sublayer - 1) % 2], str(part))
        elif axis == "matrix":
            for role, values in found.items():
                for block, value in enumerate(np.asarray(values), start=1):
                    add(name, value, block, None, ROLE_BRANCH[role], role)
        else:
            for site, values in found.items():
                if site == "embed":
                    add(name, values, 0, 0, "embed", site)
                elif site == "final":
                    add(name, values, None, None, "final", site)
                else:
                    along_sublayers(name, values, 1, site)
    return columns
