"""What a whole model computes, moves and keeps for one sequence, counted from its declaration.

Conventions. Every number is of one sequence of S tokens, an int, and exact for these operations:

- A product of a row with weights [inputs, outputs] has 2·inputs·outputs flops, and as many for each of its gradients.
- Attention scores are a flash kernel's (FlashAttention-2, arXiv 2307.08691): pairs of tokens within the causal mask and
  the window, S·(S + 1)/2 without one; in backward five products where forward has two. ``scores="eager"``: all S² pairs
  and four products in backward, which is what torch's flop counter sees of transformers' eager attention.
- What is no product is a kernel that reads its inputs once and writes its outputs once, in the model's dtype; choices,
  probabilities and statistics of norms are float32 or int32. Biases, casts, loss and sums are in a neighbour's kernel.
- ``fp8``: operands of products with weights are float8 with a byte of scale for every 32 of a row, as MXFP8 has it (OCP
  Microscaling 1.0) and as much as DeepSeek-V3's float32 for every 128 (arXiv 2412.19437, section 3.3). Router, scores
  and head compute in the model's dtype. Each product narrows its operand in a kernel of its own, along rows and along
  columns, as a block of scales serves one of the two; gradients of outputs alike. Weights are narrow already.
- ``fp8_rows``: rows go to experts in float8, and so do gradients in backward; both come home in the model's dtype
  (DeepSeek-V3, section 3.3.3).
- Logits become their gradient in place, in forward.

H hidden, E experts, K top-k, I expert width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesys.config import ModelSpec
from moesys.config.model_run import LayerRecompute
from moesys.simulator.model.layer_operations import (
    Scores,
    Sizes,
    embedding_operation,
    head_operations,
    layer_operations,
)
from moesys.simulator.model.operations import Operations


@dataclass(frozen=True)
class ModelCost:
    """Of one sequence. Layers that are equal share one object."""

    embedding: Operations
    layers: tuple[Operations, ...]
    head: Operations

    @property
    def parameters(self) -> int:
        return sum(each.parameters for each in self._all)

    @property
    def flops(self) -> int:
        """Of forward."""
        return sum(each.flops for each in self._all)

    @property
    def backward_flops(self) -> int:
        return sum(each.input_gradient_flops + each.weight_gradient_flops for each in self._all)

    def again_flops(self, recompute: LayerRecompute) -> int:
        """Returns those that backward adds by running layers forward again."""
        return sum(layer.again(recompute).flops for layer in self.layers)

    def saved_bytes(self, recompute: LayerRecompute = "none") -> int:
        """Returns what all layers, the embedding and the head keep at the end of forward."""
        layers = sum(layer.saved_bytes(recompute) for layer in self.layers)
        return self.embedding.saved_bytes() + layers + self.head.saved_bytes()

    @property
    def _all(self) -> tuple[Operations, ...]:
        return (self.embedding, *self.layers, self.head)


def count_model(
    model: ModelSpec, seq_len: int, *, fp8: bool = False, fp8_rows: bool = False, scores: Scores = "flash"
) -> ModelCost:
    """Returns what a model does with a sequence of ``seq_len`` tokens. The module says how it is counted.

    Raises ValueError for a sequence without tokens.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} has no token; use at least 1")
    sizes = Sizes(model, seq_len, fp8, fp8_rows, scores)
    cost_of = {layer: Operations(seq_len, tuple(layer_operations(layer, sizes))) for layer in model.layer_counts}
    return ModelCost(
        embedding=Operations(seq_len, (embedding_operation(sizes),)),
        layers=tuple(cost_of[layer] for layer in model.layers),
        head=Operations(seq_len, tuple(head_operations(sizes))),
    )


def model_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Returns the flops of forward and backward that a token needs: the numerator of model flops utilisation.

    Three times forward's, with scores on the pairs within mask and window; what runs again does not count (PaLM, arXiv
    2204.02311, appendix B). Megatron-Bridge counts the same but for the router, and S/2 pairs a token.
    """
    return 3 * count_model(model, seq_len).flops / seq_len
