"""What the stack shows its states and wires to while it runs."""

from collections.abc import Collection, Mapping

from jaxtyping import Array

from normflax.axes import Logits, Scalar, Stream
from normflax.probes import attention, forward, tokens
from normflax.probes.backward import watch


class Observer:
    """Reads every state on its way forward and its gradient on the way back, every sublayer's wires, and the logits: those of
    the given fields that are read on the way."""

    def __init__(self, fields: Collection[str]):
        self.fields = frozenset(fields)

    def state(self, x: Stream, slot: Scalar) -> tuple[Stream, dict[str, Scalar]]:
        """The same x, to be used from here on, and its statistics; its gradient's square arrives in `slot`'s gradient."""
        x = watch(x, slot)
        alike = tokens.statistics(x) if self.fields & set(tokens.FIELDS) else {}
        return x, self._chosen(forward.of_state(x) | alike)

    def norm(self, x: Stream) -> Scalar:
        """What a norm reads."""
        return forward.norm_input(x)

    def sublayer(self, wires: Mapping[str, Stream], sites: tuple[str, ...]) -> dict[str, Array | dict[str, Array]]:
        """Statistics of one sublayer: of its branch against its skip, and of the inputs of its norms."""
        return self._chosen(
            {
                "branch_ratio": forward.branch_ratio(dict(wires)),
                "norm_input": {site: self.norm(wires[site]) for site in sites},
            }
        )

    def attention(self, branch, u: Stream) -> dict[str, Scalar]:
        """Statistics of the attention weights of a branch that reads u. Nothing is computed for them unless one is asked for."""
        return self._chosen(attention.statistics(branch, u)) if self.fields & set(attention.FIELDS) else {}

    def logits(self, logits: Logits) -> dict[str, Scalar]:
        """Statistics of the model's logits."""
        return self._chosen(forward.of_logits(logits))

    def _chosen(self, found: dict) -> dict:
        return {name: value for name, value in found.items() if name in self.fields}
