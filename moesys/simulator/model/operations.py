"""Operations: what a model does with one sequence, counted exactly: flops, bytes, and what backward needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from moesys.config.model_run import LayerRecompute

Part = Literal[
    "embedding",
    "norms",
    "attention_projections",
    "rotary",
    "attention_scores",
    "router",
    "dispatch",
    "experts",
    "combine",
    "shared_experts",
    "dense_mlp",
    "residuals",
    "head",
]

# What a layer keeps of forward, beside what leaves it.
#   none       every tensor that backward reads.
#   selective  the rows that come into its two halves, attention and MLP. In backward runs again what leads from them to
#              tensors that backward reads: not the output projection, down projections, combine and residuals.
#   full       the row that comes into the layer. In backward the whole layer runs again.
_KEPT: Mapping[LayerRecompute, frozenset[str]] = MappingProxyType(
    {"selective": frozenset({"layer_input", "mlp_input"}), "full": frozenset({"layer_input"})}
)


@dataclass(frozen=True)
class Operation:
    """One kernel or product on all tokens of a sequence.

    parameters: those it reads, of all experts.
    flops: of its products in forward. A multiplication and an addition are two.
    input_gradient_flops, weight_gradient_flops: of its products in backward.
    forward_bytes, backward_bytes: read and written in memory, of what is not a product.
    sent_bytes: of rows that it sends to experts or home, were all of them elsewhere. Backward sends rows of the compute
        dtype back the same way.
    saved: bytes of each tensor that its backward reads. Operations that read the same tensor have one name for it.
    fp8: its products are in float8.
    runs_again: in backward under ``recompute="selective"``, as something there reads what comes of it.
    """

    name: str
    part: Part
    parameters: int = 0
    flops: int = 0
    input_gradient_flops: int = 0
    weight_gradient_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    sent_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    fp8: bool = False
    runs_again: bool = True

    @property
    def backward_kernels(self) -> int:
        """For gradients of inputs and of weights, one each."""
        return (self.input_gradient_flops > 0 or self.backward_bytes > 0) + (self.weight_gradient_flops > 0)


@dataclass(frozen=True)
class Operations:
    """Operations that run one after another on one sequence of ``seq_len`` tokens, and their sums."""

    seq_len: int
    operations: tuple[Operation, ...]

    def of(self, *parts: Part) -> Operations:
        """Returns those of some parts."""
        return Operations(self.seq_len, tuple(each for each in self.operations if each.part in parts))

    def again(self, recompute: LayerRecompute) -> Operations:
        """Returns those that run forward once more in backward."""
        match recompute:
            case "none":
                return Operations(self.seq_len, ())
            case "selective":
                return Operations(self.seq_len, tuple(each for each in self.operations if each.runs_again))
            case "full":
                return self

    def saved(self, recompute: LayerRecompute = "none") -> dict[str, int]:
        """Returns bytes of each tensor that is kept from forward until backward."""
        tensors = {name: num_bytes for each in self.operations for name, num_bytes in each.saved.items()}
        if recompute == "none":
            return tensors
        return {name: num_bytes for name, num_bytes in tensors.items() if name in _KEPT[recompute]}

    def saved_bytes(self, recompute: LayerRecompute = "none") -> int:
        return sum(self.saved(recompute).values())

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they first run."""
        return tuple(dict.fromkeys(each.part for each in self.operations))

    @property
    def parameters(self) -> int:
        return sum(each.parameters for each in self.operations)

    @property
    def dense_parameters(self) -> int:
        """Of all but the routed experts."""
        return self.parameters - self.of("experts").parameters

    @property
    def flops(self) -> int:
        """Of forward."""
        return sum(each.flops for each in self.operations)

    @property
    def input_gradient_flops(self) -> int:
        return sum(each.input_gradient_flops for each in self.operations)

    @property
    def weight_gradient_flops(self) -> int:
        return sum(each.weight_gradient_flops for each in self.operations)

    @property
    def forward_bytes(self) -> int:
        return sum(each.forward_bytes for each in self.operations)

    @property
    def backward_bytes(self) -> int:
        return sum(each.backward_bytes for each in self.operations)

    @property
    def sent_bytes(self) -> int:
        """Of forward."""
        return sum(each.sent_bytes for each in self.operations)
