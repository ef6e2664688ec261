"""The letters that shapes are written in, here and in every docstring, and the array types that carry them.

B batch · T tokens · D width · H heads · K head width · F FFN width · V vocabulary · L blocks ("depth") · S sublayers

A decoder block has two sublayers (attention, then FFN), so S = 2·L. The stream has S + 1 states: entry 0 is the embedding's
output, entry s the stream after sublayer s, entry S the last before the final norm.
"""

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Stream = Float[Array, "B T D"]
Tokens = Int[Array, "B T"]
Mask = Bool[Array, "B T"]
Logits = Float[Array, "B T V"]
Scalar = Float[Array, ""]
Count = Int[Array, ""]
PerSublayer = Float[Array, "S"]
Key = PRNGKeyArray
