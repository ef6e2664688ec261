"""A placement as a person reads it, derived from its entry: the equation of a sublayer and a picture of it."""

from normflax.model.placements import Coefficient, Placement


def scale(coefficient: Coefficient, symbol: str) -> str:
    """A factor in an equation: nothing for 1, the number, or the symbol of a function of depth."""
    if callable(coefficient):
        return f"{symbol}·"
    return "" if coefficient == 1 else f"{coefficient:g}·"


def norm(site: object, text: str) -> str:
    """The text inside a norm where the site holds one."""
    return f"N({text})" if site else text


def equation(entry: Placement) -> str:
    """One sublayer with branch F and norm N: `x' = N(a·x + F(x))`. x_l is the block's input."""
    u = norm(entry.pre, "x")
    skip = {"x": "x", "u": u, "block": "x_l"}[entry.skip_from]
    y = norm(entry.out, f"F({scale(entry.input, 'c')}{u})")
    total = f"{scale(entry.skip, 'a')}{skip} + {scale(entry.branch, 'b')}{y}"
    return f"x' = {norm(entry.post, total)}"


def diagram(entry: Placement) -> str:
    """The sublayer's wires: the branch above, the skip below, what meets the sum on the right."""
    coefficients = {"skip": (entry.skip, "a"), "branch": (entry.branch, "b"), "input": (entry.input, "c")}
    factor = {path: scale(*named).rstrip("·") for path, named in coefficients.items()}
    read = [f"·{factor['input']}"] * bool(factor["input"])
    written = ["N"] * bool(entry.out) + [f"·{factor['branch']}"] * bool(factor["branch"])
    steps = ["N"] * bool(entry.pre) + read + ["F"] + written
    split = 1 if entry.skip_from == "u" and entry.pre else 0
    head = " ─ ".join(["x", *steps[:split]])
    top = " ─ ".join(steps[split:])
    tail = " ─ N ─ x'" if entry.post else " ─ x'"
    below = (f" ·{factor['skip']} " if factor["skip"] else "").center(len(top) + 2, "─")
    first = f"{head} ─┬─ {top} ─(+){tail}"
    return f"{first}\n{' ' * (len(head) + 2)}└─{below}──┘"
