"""A training step without normflax: the same Pre-LN decoder, loss and AdamW in plain JAX, written for speed alone.

It has no placements, probes, modules or options. What the library costs is the ratio of its step to this one.
"""

import jax
import jax.numpy as jnp
import optax


def init(key, depth: int, width: int, hidden: int, vocab: int, tokens: int) -> dict:
    """Stacked parameters [L, …]."""
    shapes = {
        "qkv": (depth, width, 3 * width),
        "out": (depth, width, width),
        "up": (depth, width, hidden),
        "down": (depth, hidden, width),
        "embed": (vocab, width),
        "position": (tokens, width),
        "head": (width, vocab),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {name: 0.05 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    params |= {f"{name}_c": jnp.zeros((depth, params[name].shape[-1])) for name in ("qkv", "out", "up", "down")}
    for norm in ("n1", "n2"):
        params |= {norm: jnp.ones((depth, width)), f"{norm}_c": jnp.zeros((depth, width))}
    return params | {"final": jnp.ones(width), "final_c": jnp.zeros(width)}


def layer_norm(x, w, c):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * w + c


BLOCK = ("qkv", "out", "up", "down", "qkv_c", "out_c", "up_c", "down_c", "n1", "n1_c", "n2", "n2_c")


def loss(params: dict, tokens, heads: int):
    """Mean next-token cross-entropy; the backward pass computes again all but the products with weights."""
    x, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = x.shape
    width = params["head"].shape[0]
    mask = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e30)
    h = params["embed"][x] + params["position"][:length]

    def block(h, p):
        u = layer_norm(h, p["n1"], p["n1_c"]).reshape(-1, width)
        q, k, v = jnp.transpose((u @ p["qkv"] + p["qkv_c"]).reshape(batch, length, 3, heads, -1), (2, 0, 3, 1, 4))
        s = jnp.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k) + mask
        e = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
        y = jnp.einsum("bhqk,bhkd->bhqd", e, v) / jnp.sum(e, -1, keepdims=True)
        h = h + (jnp.transpose(y, (0, 2, 1, 3)).reshape(-1, width) @ p["out"] + p["out_c"]).reshape(h.shape)
        u = layer_norm(h, p["n2"], p["n2_c"]).reshape(-1, width)
        return h + (jax.nn.gelu(u @ p["up"] + p["up_c"]) @ p["down"] + p["down_c"]).reshape(h.shape), None

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    h, _ = jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), h, {name: params[name] for name in BLOCK})
    logits = layer_norm(h, params["final"], params["final_c"]).reshape(-1, width) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1)))


def program(depth: int, width: int, heads: int, vocab: int, batch: int, tokens: int):
    """(step, state, data): the compiled donating step, its first state and the text it draws windows from."""
    adam = optax.adamw(1e-3, weight_decay=0.0)

    def step(state, text, t):
        params, memory = state
        key = jax.random.fold_in(jax.random.key(0), t)
        start = jax.random.randint(key, (batch, 1), 0, len(text) - tokens)
        windows = text[start + jnp.arange(tokens + 1)].astype(jnp.int32)
        value, gradients = jax.value_and_grad(loss)(params, windows, heads)
        change, memory = adam.update(gradients, memory, params)
        return (optax.apply_updates(params, change), memory), (value, optax.global_norm(gradients))

    params = jax.jit(init, static_argnums=(1, 2, 3, 4, 5))(jax.random.key(0), depth, width, 4 * width, vocab, tokens)
    state = (params, adam.init(params))
    text = jax.random.randint(jax.random.key(1), (1_000_000,), 0, vocab).astype(jnp.uint8)
    compiled = jax.jit(step, donate_argnums=0).lower(state, text, jnp.int32(0)).compile()
    return compiled, state, text
