"""What probes measure, from the reference's forward pass: float64 NumPy, loops, central differences."""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float
from reference import Mask, Params, Spec, Stream, Tokens, Trace, cross_entropy, forward, resume, softmax


def statistics(trace: Trace) -> dict:
    """Scales of a forward pass; means run over batch and tokens, masked targets included.

    token_cosine, rank_one_residual, stable_rank, effective_rank [S+1] of every state: see `alike` (M18, M19)
    second_moment [S+1]: mean over (b, t, i) of x^2 (M01)
    variance      [S+1]: mean over (b, t) of the biased variance over i (M02)
    peak          [S+1]: max over (b, t, i) of |x| (M04)
    norm_input    site -> [norms]: mean over (b, t) of ||u||_2 / sqrt(D), uncentred, for every norm (M03)
    branch_ratio  [S]: mean over (b, t) of ||b * out(F(u))||_2 / ||a * skip||_2 (M22)
    attention_entropy [L]: mean over (b, h, t) of -sum_j A ln A; _share: that over the mean over t of ln(keys seen) (M23)
    max_logit     [L]: largest score of a key that is seen (M24)
    log_z, log_z_rms, mean_logit []: of ln Z = ln sum exp(logits) the mean and root mean square; mean of the logits (M25)
    """
    length = np.linalg.norm
    weights = [softmax(scores) for scores in trace.scores]
    entropy = np.array([np.mean(-np.sum(w * np.log(np.where(w > 0, w, 1)), -1)) for w in weights])
    seen = np.array([np.mean(np.log(np.isfinite(scores).sum(-1))) for scores in trace.scores])
    log_z = np.log(np.exp(trace.logits).sum(-1))
    return {
        "attention_entropy": entropy,
        "attention_entropy_share": entropy / seen,
        "max_logit": np.array([scores.max() for scores in trace.scores]),
        "log_z": np.mean(log_z),
        "log_z_rms": np.sqrt(np.mean(log_z**2)),
        "mean_logit": np.mean(trace.logits),
        "second_moment": np.array([np.mean(x**2) for x in trace.states]),
        **{field: np.array([alike(x)[field] for x in trace.states]) for field in alike(trace.states[0])},
        "variance": np.array([x.var(-1).mean() for x in trace.states]),
        "peak": np.array([np.abs(x).max() for x in trace.states]),
        "norm_input": {
            site: np.array([np.mean(length(u, axis=-1)) / np.sqrt(u.shape[-1]) for u in inputs])
            for site, inputs in trace.norm_inputs.items()
        },
        "branch_ratio": np.array([np.mean(length(f, axis=-1) / length(x, axis=-1)) for f, x in trace.branch]),
    }


def alike(x: Stream) -> dict[str, float]:
    """How alike the tokens of a sequence are: the mean cosine over pairs of different ones (M18); of X [T, D] what is left
    without its mean row, ||X||_F^2 / sigma_1^2 and exp of the entropy of sigma / sum sigma, means over sequences (M19)."""
    B, T, _ = x.shape
    length = np.linalg.norm
    pairs = [(b, t, s) for b in range(B) for t in range(T) for s in range(T) if t != s]
    sigma = np.stack([np.linalg.svd(X, compute_uv=False) for X in x])
    p = sigma / sigma.sum(-1, keepdims=True)
    return {
        "token_cosine": np.mean([x[b, t] @ x[b, s] / (length(x[b, t]) * length(x[b, s])) for b, t, s in pairs])
        if pairs
        else np.nan,
        "rank_one_residual": np.mean([length(X - X.mean(0)) / length(X) for X in x]),
        "stable_rank": np.mean([length(X) ** 2 / s[0] ** 2 for X, s in zip(x, sigma, strict=True)]),
        "effective_rank": np.mean(np.exp(-np.sum(p * np.log(np.where(p > 1e-15, p, 1)), -1))),
    }


def amplification(params: Params, tokens: Tokens, spec: Spec, change: Params, h: float = 1e-3) -> Float[np.ndarray, " S"]:
    """M11: the squared length of the derivative of x_k / std(x_k) along `change`, by central differences."""

    def units(scale: float) -> list[np.ndarray]:
        states = forward({name: w + scale * change.get(name, 0.0) for name, w in params.items()}, tokens, spec).states[1:]
        return [x / x.std(-1, keepdims=True) for x in states]

    return np.array([np.sum(((up - down) / (2 * h)) ** 2) for up, down in zip(units(h), units(-h), strict=True)])


def dependency(params: Params, trace: Trace, spec: Spec) -> Float[np.ndarray, "S parts"]:
    """M12: std over features of the part of x_k that sublayer j wrote over that of x_k, mean over tokens; every part is
    carried up by itself, through norms that keep the statistics of the whole."""
    S, inputs = 2 * spec.depth, {site: list(u) for site, u in trace.norm_inputs.items()}
    a = np.broadcast_to(spec.a, S)
    found = np.zeros((S, S + 1))

    def normed(part: Stream, site: str, s: int) -> Stream:
        block, kind = s // 2, ("attention", "ffn")[s % 2]
        whole, offset = inputs[f"{kind}.{site}"][block], 1.0 if spec.gain_form == "1+w" else 0.0
        gain = params.get(f"{kind}.norm_{site}.scale")
        gain = 1.0 if gain is None else np.asarray(gain[block], np.float64) + offset
        if spec.norm == "layer":
            part, whole = (x - x.mean(-1, keepdims=True) for x in (part, whole))
        return gain * part / np.sqrt(np.mean(whole**2, -1, keepdims=True) + spec.eps)

    for j in range(S + 1):
        part = trace.states[0] if j == 0 else np.zeros_like(trace.states[0])
        entry = part
        for s in range(S):
            entry = part if s % 2 == 0 else entry
            skip = {"x": part, "u": normed(part, "pre", s) if spec.skip_from == "u" and spec.pre else part, "block": entry}
            part = a[s] * skip[spec.skip_from] + (trace.branch[s][0] if s + 1 == j else 0.0)
            part = normed(part, "post", s) if spec.post else part
            found[s, j] = np.mean(part.std(-1) / trace.states[s + 1].std(-1))
    return found


def numerical_gradient(
    f: Callable[[np.ndarray], float], array: np.ndarray, indices: Iterable[tuple[int, ...]], h: float = 1e-5
) -> Float[np.ndarray, " n"]:
    """Central differences (f(x + h e_i) - f(x - h e_i)) / 2h at the indices, in their order, in float64."""
    slopes = []
    for i in indices:
        high, low = np.array(array, np.float64), np.array(array, np.float64)
        high[i] += h
        low[i] -= h
        slopes.append((f(high) - f(low)) / (2 * h))
    return np.array(slopes)


def activation_gradient(params: Params, tokens: Tokens, targets: Tokens, mask: Mask, spec: Spec, l: int, h: float = 1e-5) -> Stream:
    """dLoss / dx_l of the mean loss, x_l the stream after sublayer l = 0 … S (after its last norm), by central
    differences through the remaining sublayers. Inside a block the input of the block is held fixed."""
    states = forward(params, tokens, spec).states
    block_input = states[l - 1] if l % 2 else None

    def loss_from(x_l: np.ndarray) -> float:
        return cross_entropy(resume(params, spec, l, x_l, block_input), targets, mask)

    return numerical_gradient(loss_from, states[l], np.ndindex(states[l].shape), h).reshape(states[l].shape)


def gradient_statistics(gradient: Stream, mask: Mask) -> dict[str, float]:
    """M05: grad_rms = (number of valid targets) * sqrt(mean over (b, t, i) of G^2); grad_frobenius = ||G||_F."""
    square = gradient**2
    return {"grad_rms": float(mask.sum() * np.sqrt(square.mean())), "grad_frobenius": float(np.sqrt(square.sum()))}
