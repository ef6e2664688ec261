"""Where a step first stopped being finite."""

import numpy as np


def first_bad(measured: dict) -> str | None:
    """The place a non-finite step went wrong, from its layers.

    Going forward, the lowest state of the stream that is not finite; with a finite forward pass, the highest state whose gradient
    is not, since gradients travel down; then the highest block with such a matrix gradient. None where everything read is finite.
    """
    # The largest value is read before the squares, which overflow while the stream itself is still finite.
    forward = next((measured[name] for name in ("peak", "second_moment", "variance") if name in measured), ())
    if len(bad := np.flatnonzero(~np.isfinite(forward))):
        return f"the stream after {_sublayer(int(bad[0]))}"
    backward = next((measured[name] for name in ("grad_frobenius", "grad_rms") if name in measured), ())
    if len(bad := np.flatnonzero(~np.isfinite(backward))):
        return f"the gradient of the stream after {_sublayer(int(bad[-1]))}"
    if "grad_block" in measured and len(bad := np.flatnonzero(~np.isfinite(measured["grad_block"]))):
        return f"the weight gradients of block {int(bad[-1]) + 1}"
    return None


def _sublayer(state: int) -> str:
    """`the embedding`, or the sublayer's number and block."""
    if state == 0:
        return "the embedding"
    return f"sublayer {state} ({'attention' if state % 2 else 'FFN'} of block {(state + 1) // 2})"
