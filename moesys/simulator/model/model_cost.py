"""Counts what a whole model computes, moves and keeps for one sequence, from its declaration.

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
- ``fp8_rows``: rows go to experts in float8, and so do gradients in backward; both return in the model's dtype
  (DeepSeek-V3, section 3.3.3).
- Logits become their gradient in place, in forward.

H hidden, E experts, K top-k, I expert width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from moesys.config import BYTES_PER_GB, DenseMlp, Gqa, LayerSpec, Mla, ModelSpec, MoeMlp
from moesys.config.model import Product
from moesys.config.model_run import LayerRecompute
from moesys.display import Columns, Display, by_column, counted, draw_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

# The tensors that a layer keeps from its forward pass, besides its output.
#   none       every tensor that backward reads.
#   selective  the inputs of its two halves, attention and MLP. Backward runs again what leads from them to tensors that
#              it reads: not the output projection, down projections, combine and residuals.
#   full       the input of the layer. Backward runs the whole layer again.
_KEPT: Mapping[LayerRecompute, frozenset[str]] = MappingProxyType(
    {"selective": frozenset({"layer_input", "mlp_input"}), "full": frozenset({"layer_input"})}
)


@dataclass(frozen=True)
class Operation:
    """One kernel or product on all tokens of a sequence.

    parameters: the parameters that it reads, of all experts.
    flops: those of its products in forward. A multiplication and an addition are two.
    input_gradient_flops, weight_gradient_flops: those of its products in backward.
    forward_bytes, backward_bytes: bytes that it reads and writes in memory, if it is not a product.
    sent_bytes: bytes of the rows that it sends to experts or back, if all of them are on other ranks. Backward sends
        rows of the compute dtype in the opposite direction.
    saved: bytes of each tensor that its backward reads. Operations that read the same tensor have one name for it.
    fp8: whether its products are in float8.
    runs_again: whether it runs again in backward under ``recompute="selective"``, as backward reads its output.
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
        """Number of kernels in backward: one for gradients of inputs, and one for those of weights."""
        return (self.input_gradient_flops > 0 or self.backward_bytes > 0) + (self.weight_gradient_flops > 0)


@dataclass(frozen=True)
class Operations:
    """Operations that run one after another on one sequence of ``seq_len`` tokens, and their sums."""

    seq_len: int
    operations: tuple[Operation, ...] = field(repr=False)

    def of(self, *parts: Part) -> Operations:
        """Returns the operations of some parts."""
        return Operations(self.seq_len, tuple(each for each in self.operations if each.part in parts))

    def again(self, recompute: LayerRecompute) -> Operations:
        """Returns the operations that run forward once more in backward."""
        match recompute:
            case "none":
                return Operations(self.seq_len, ())
            case "selective":
                return Operations(self.seq_len, tuple(each for each in self.operations if each.runs_again))
            case "full":
                return self

    def saved(self, recompute: LayerRecompute = "none") -> dict[str, int]:
        """Returns the bytes of each tensor that is kept from forward until backward."""
        tensors = {name: num_bytes for each in self.operations for name, num_bytes in each.saved.items()}
        if recompute == "none":
            return tensors
        return {name: num_bytes for name, num_bytes in tensors.items() if name in _KEPT[recompute]}

    def saved_bytes(self, recompute: LayerRecompute = "none") -> int:
        return sum(self.saved(recompute).values())

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order in which they first run."""
        return tuple(dict.fromkeys(each.part for each in self.operations))

    @property
    def parameters(self) -> int:
        return sum(each.parameters for each in self.operations)

    @property
    def dense_parameters(self) -> int:
        """The number of parameters without routed experts."""
        return self.parameters - self.of("experts").parameters

    @property
    def flops(self) -> int:
        """The flops of forward."""
        return sum(each.flops for each in self.operations)

    @property
    def backward_flops(self) -> int:
        return sum(each.input_gradient_flops + each.weight_gradient_flops for each in self.operations)

    @property
    def forward_bytes(self) -> int:
        return sum(each.forward_bytes for each in self.operations)

    @property
    def backward_bytes(self) -> int:
        return sum(each.backward_bytes for each in self.operations)


@dataclass(frozen=True, repr=False)
class ModelCost(Display):
    """The operations of a model on one sequence. Layers that are equal share one object."""

    embedding: Operations
    layers: tuple[Operations, ...]
    head: Operations

    @property
    def parameters(self) -> int:
        return sum(each.parameters for each in self._all)

    @property
    def flops(self) -> int:
        """The flops of forward."""
        return sum(each.flops for each in self._all)

    @property
    def backward_flops(self) -> int:
        return sum(each.backward_flops for each in self._all)

    def saved_bytes(self, recompute: LayerRecompute = "none") -> int:
        """Returns what all layers, the embedding and the head keep at the end of forward."""
        layers = sum(layer.saved_bytes(recompute) for layer in self.layers)
        return self.embedding.saved_bytes() + layers + self.head.saved_bytes()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the flops of forward and backward by part of the model."""
        part, _, forward, backward = self._shown().values()
        tflop = {name: one + other for name, one, other in zip(part, forward, backward, strict=True)}
        title = f"a sequence of {self.embedding.seq_len:,} tokens: {sum(tflop.values()):,.1f} TFLOP"
        return draw_bars(tflop, title, "TFLOP of forward and backward", ax)

    def _facts(self) -> str:
        return (
            f"{counted(len(self.layers), 'layer')}, {self.parameters / 1e9:,.2f} B parameters, "
            f"{self.flops / 1e12:,.2f} TFLOP in forward and {self.backward_flops / 1e12:,.2f} in backward, "
            f"{self.saved_bytes() / BYTES_PER_GB:,.2f} GB saved, for a sequence of {self.embedding.seq_len:,} tokens"
        )

    def _columns(self) -> Columns:
        rows = [
            (layer, part, of.parameters, of.flops, of.backward_flops, of.forward_bytes)
            for layer, each in zip(("embedding", *range(len(self.layers)), "head"), self._all, strict=True)
            for part, of in ((part, each.of(part)) for part in each.parts)
        ]
        names = ("layer", "part", "parameters", "flops", "backward_flops", "forward_bytes")
        return by_column(names, rows)

    def _shown(self) -> Columns:
        """Returns the sums over layers by part."""
        whole = Operations(self.embedding.seq_len, tuple(op for each in self._all for op in each.operations))
        sums = {part: whole.of(part) for part in whole.parts}
        rows = [(part, of.parameters / 1e9, of.flops / 1e12, of.backward_flops / 1e12) for part, of in sums.items()]
        return by_column(("part", "parameters, B", "TFLOP in forward", "in backward"), rows)

    @property
    def _all(self) -> tuple[Operations, ...]:
        return (self.embedding, *self.layers, self.head)


def count_model(
    model: ModelSpec, seq_len: int, *, fp8: bool = False, fp8_rows: bool = False, scores: Scores = "flash"
) -> ModelCost:
    """Returns the operations of a model on a sequence of ``seq_len`` tokens. The module's docstring says how they are
    counted.

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


Scores = Literal["flash", "eager"]
_WORD = 4
_TOKEN_ID = 8
_SCALED_TOGETHER = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of what a token and a sequence of S tokens have."""

    model: ModelSpec
    seq_len: int
    fp8: bool
    fp8_rows: bool
    scores: Scores

    def rows(self, rows: int, width: int, fp8: bool = False) -> int:
        """Returns the bytes of ``rows`` per token, in the model's dtype or in float8 with scales."""
        element_bytes = self.model.bytes_per_element
        row = width + -(-width // _SCALED_TOGETHER) if fp8 else width * element_bytes
        return self.seq_len * rows * row

    def narrowed(self, rows: int, width: int, came: bool = False) -> int:
        """Returns the bytes read and written to narrow rows of an operand: once along rows, for the product, and once
        along columns, for the gradient of weights. Rows that ``came`` narrow need the second only.
        """
        narrow = self.rows(rows, width, fp8=True)
        return 2 * narrow if came else self.rows(rows, width) + 2 * narrow

    def words(self, count: int) -> int:
        """Returns the bytes of so many float32 or int32 numbers per token."""
        return self.seq_len * count * _WORD

    def pairs(self, window: int | None) -> int:
        """Returns the number of pairs of query and key whose scores are computed."""
        S = self.seq_len
        if self.scores == "eager":
            return S * S
        seen = S if window is None else min(window, S)
        return seen * (seen + 1) // 2 + (S - seen) * seen


def _product(
    name: str,
    part: Part,
    product: Product,
    operand: str,
    sizes: Sizes,
    *,
    rows: int = 1,
    copies: int = 1,
    narrow: bool = True,
    came: Literal["rows", "gradients"] | None = None,
    runs_again: bool = True,
) -> Operation:
    """Returns a product of ``rows`` per token with weights, of which there are ``copies`` and each row meets one.
    ``narrow``: in float8 if the model's products are. ``came``: what is in float8 already.
    """
    flops = sizes.seq_len * rows * product.flops
    fp8 = sizes.fp8 and narrow
    casts = [
        sizes.narrowed(rows, width, sizes.fp8_rows and came == which) if fp8 else 0
        for which, width in (("rows", product.inputs), ("gradients", product.outputs))
    ]
    return Operation(
        name,
        part,
        parameters=copies * product.parameters,
        flops=flops,
        input_gradient_flops=flops,
        weight_gradient_flops=flops,
        forward_bytes=casts[0],
        backward_bytes=casts[1],
        # In float8 an operand is another tensor than the one that other operations read.
        saved={f"{operand}_fp8" if fp8 else operand: sizes.rows(rows, product.inputs, fp8)},
        fp8=fp8,
        runs_again=runs_again,
    )


def _norm(name: str, width: int, tensor: str, sizes: Sizes, weights: int | None = None, groups: int = 1) -> Operation:
    """Returns an RMSNorm of rows of ``width``, of which ``groups`` parts are normalised by themselves."""
    return Operation(
        name,
        "norms",
        parameters=width if weights is None else weights,
        forward_bytes=2 * sizes.rows(1, width),
        backward_bytes=3 * sizes.rows(1, width),
        saved={tensor: sizes.rows(1, width), f"{name}_statistics": sizes.words(groups)},
    )


def _residual(name: str, sizes: Sizes) -> Operation:
    moved = 3 * sizes.rows(1, sizes.model.hidden_size)
    return Operation(name, "residuals", forward_bytes=moved, backward_bytes=moved, runs_again=False)


def layer_operations(layer: LayerSpec, sizes: Sizes) -> Iterator[Operation]:
    """Yields a layer's operations."""
    H = sizes.model.hidden_size
    yield _norm("attention_norm", H, "layer_input", sizes)
    yield from _attention(layer.attention, sizes)
    yield _residual("attention_residual", sizes)
    yield _norm("mlp_norm", H, "mlp_input", sizes)
    if isinstance(layer.mlp, MoeMlp):
        yield from _experts(layer.mlp, sizes)
    else:
        yield from _dense("dense", "dense_mlp", layer.mlp, sizes)
    yield _residual("mlp_residual", sizes)


def _attention(attention: Gqa | Mla, sizes: Sizes) -> Iterator[Operation]:
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    match attention:
        case Gqa():
            yield from _gqa_rows(attention, sizes)
        case Mla():
            yield from _mla_rows(attention, sizes)
    pairs = sizes.pairs(attention.window)
    query_key, value = (2 * heads * width * pairs for width in (attention.qk_head_dim, attention.v_head_dim))
    yield Operation(
        "scores",
        "attention_scores",
        parameters=attention.sinks * heads,
        flops=query_key + value,
        # A flash kernel computes the scores again.
        input_gradient_flops=(3 if sizes.scores == "flash" else 2) * query_key + 2 * value,
        saved={
            "queries": sizes.rows(heads, attention.qk_head_dim),
            "keys": sizes.rows(kv_heads, attention.qk_head_dim),
            "values": sizes.rows(kv_heads, attention.v_head_dim),
            "attention_output": sizes.rows(heads, attention.v_head_dim),
            "attention_statistics": sizes.words(heads),
        },
    )
    output = attention.products(sizes.model.hidden_size)["output"]
    yield _product("output", "attention_projections", output, "attention_output", sizes, runs_again=False)


def _gqa_rows(attention: Gqa, sizes: Sizes) -> Iterator[Operation]:
    """Yields the operations that make queries, keys and values."""
    qkv = attention.products(sizes.model.hidden_size)["qkv"]
    yield _product("qkv", "attention_projections", qkv, "attention_rows", sizes)
    heads = attention.num_heads + attention.num_kv_heads
    width = heads * attention.head_dim
    if attention.qk_norm is not None:
        groups = heads if attention.qk_norm == "head" else 2
        yield _norm("qk_norm", width, "unnormed_queries_keys", sizes, sum(attention.norm_widths), groups)
    yield _rotary(2 * width, sizes)


def _mla_rows(attention: Mla, sizes: Sizes) -> Iterator[Operation]:
    """Yields the operations that make queries, keys and values by their latents."""
    for name, product in attention.products(sizes.model.hidden_size).items():
        if name == "output":
            continue
        operand = "attention_rows"
        if name.endswith("_up"):
            latent, operand = name.replace("up", "latent"), f"{name}_rows"
            yield _norm(f"{latent}_norm", product.inputs, latent, sizes)
        yield _product(name, "attention_projections", product, operand, sizes)
    # Queries are rotated in place; keys are put together, with one rotated part for all heads.
    heads, rope = attention.num_heads, attention.qk_rope_head_dim
    yield _rotary(2 * heads * rope + rope + heads * (attention.qk_nope_head_dim + attention.qk_head_dim), sizes)


def _rotary(moved: int, sizes: Sizes) -> Operation:
    """Returns the rotary embedding, which reads and writes ``moved`` elements per token."""
    num_bytes = sizes.rows(1, moved)
    return Operation("rotary", "rotary", forward_bytes=num_bytes, backward_bytes=num_bytes)


def _activation(name: str, part: Part, up: Product, down: Product, sizes: Sizes, rows: int = 1) -> Operation:
    read, written = sizes.rows(rows, up.outputs), sizes.rows(rows, down.inputs)
    return Operation(
        f"{name}_activation",
        part,
        forward_bytes=read + written,
        backward_bytes=2 * read + written,
        saved={f"{name}_up": read},
    )


def _dense(name: str, part: Part, mlp: DenseMlp, sizes: Sizes, down_again: bool = False) -> Iterator[Operation]:
    up, down = mlp.products(sizes.model.hidden_size).values()
    yield _product(f"{name}_up", part, up, "mlp_rows", sizes)
    yield _activation(name, part, up, down, sizes)
    yield _product(f"{name}_down", part, down, f"{name}_activated", sizes, runs_again=down_again)


def _experts(mlp: MoeMlp, sizes: Sizes) -> Iterator[Operation]:
    H, E, K = mlp.shape.hidden_size, mlp.shape.num_experts, mlp.shape.top_k
    up, down = mlp.expert_products.values()
    yield _product("router", "router", mlp.router, "mlp_rows", sizes, narrow=False)
    yield Operation(
        "choice",
        "router",
        forward_bytes=sizes.words(2 * E + 3 * K),
        backward_bytes=sizes.words(2 * E + 2 * K),
        # For each choice its expert, its weight, and the place of its row.
        saved={"router_probabilities": sizes.words(E), "choices": sizes.words(3 * K)},
    )
    sent = sizes.rows(K, H, sizes.fp8_rows)
    home = sizes.rows(K + 1, H)
    yield Operation("dispatch", "dispatch", forward_bytes=sizes.rows(K, H) + sent, backward_bytes=home, sent_bytes=sent)
    yield _product("expert_up", "experts", up, "expert_rows", sizes, rows=K, copies=E, came="rows")
    yield _activation("expert", "experts", up, down, sizes, rows=K)
    # The weights' gradient needs no output of an expert: it is the activation times the gradient of the activation.
    yield _product(
        "expert_down", "experts", down, "expert_activated", sizes, rows=K, copies=E, came="gradients", runs_again=False
    )
    if mlp.shared is not None:
        yield from _dense("shared", "shared_experts", mlp.shared, sizes, down_again=mlp.shared_gate)
    if mlp.shared_gate:
        yield _product("shared_gate", "shared_experts", Product(H, 1), "mlp_rows", sizes, narrow=False)
        yield Operation(
            "shared_scale",
            "shared_experts",
            forward_bytes=2 * sizes.rows(1, H),
            backward_bytes=3 * sizes.rows(1, H),
            saved={"shared_output": sizes.rows(1, H), "shared_scale": sizes.words(1)},
            runs_again=False,
        )
    beside = sizes.rows(1, H) if mlp.shared is not None else 0
    yield Operation(
        "combine",
        "combine",
        forward_bytes=home + beside,
        backward_bytes=home,
        sent_bytes=sizes.rows(K, H),
        runs_again=False,
    )


def embedding_operation(sizes: Sizes) -> Operation:
    """Returns the operation of the embedding."""
    row = sizes.rows(1, sizes.model.hidden_size)
    return Operation(
        "embedding",
        "embedding",
        parameters=sizes.model.embedding_parameters,
        forward_bytes=2 * row,
        backward_bytes=3 * row,
        saved={"token_ids": sizes.seq_len * _TOKEN_ID},
    )


def head_operations(sizes: Sizes) -> Iterator[Operation]:
    """Yields the operations after the last layer."""
    H, V = sizes.model.hidden_size, sizes.model.vocab_size
    yield _norm("head_norm", H, "head_input", sizes)
    held = 0 if sizes.model.tied_embeddings else 1
    yield _product("head", "head", Product(H, V), "head_rows", sizes, copies=held, narrow=False)
    logits = sizes.rows(1, V)
    yield Operation("loss", "head", forward_bytes=2 * logits, saved={"logits": logits})
