"""What the stack shows its states and wires to while it runs."""

from collections.abc import Mapping

from jaxtyping import Array

from normflax.axes import Scalar, Stream
from normflax.probes import forward
from normflax.probes.backward import watch


class Observer:
    """Reads every state on its way forward and its gradient on the way back, and every sublayer's wires."""

    def state(self, x: Stream, slot: Scalar) -> tuple[Stream, dict[str, Scalar]]:
        """The same x, to be used from here on, and its statistics; its gradient's square arrives in `slot`'s gradient."""
        x = watch(x, slot)
        return x, forward.of_state(x)

    def norm(self, x: Stream) -> Scalar:
        """What a norm reads."""
        return forward.norm_input(x)

    def sublayer(self, wires: Mapping[str, Stream], sites: tuple[str, ...]) -> dict[str, Array | dict[str, Array]]:
        """Statistics of one sublayer: of its branch against its skip, and of the inputs of its norms."""
        return {
            "branch_ratio": forward.branch_ratio(dict(wires)),
            "norm_input": {site: self.norm(wires[site]) for site in sites},
        }
