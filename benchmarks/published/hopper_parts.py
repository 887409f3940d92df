"""Published times of kernels like the MegaKernels' parts, on Hopper, beside what the simulator has for such a part.

They are other people's kernels: Triton-distributed's push rows where these pull, Kraken's exchange counts as well. So
this shows how far a part is from anything that was measured, not how fast this project's kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published.claims import Claim
from moesys.balance.plan import plan_layer
from moesys.config import ClusterSpec, MegaKernel, ModelShape, Strategy, presets
from moesys.lab.show.sheets import Sheet
from moesys.layout import TokenPlan
from moesys.load import LoadMatrix
from moesys.simulator.mega.layer_pass import MegaPass, QueuedPass


@dataclass(frozen=True)
class EvenLayer:
    """A layer of ``tokens`` a rank in bfloat16; experts are equally popular, and tokens choose them by chance."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int

    @property
    def words(self) -> dict[str, str]:
        """For tables."""
        shape = f"{self.hidden}, {self.width}, {self.experts}, {self.top_k}"
        return {"layer": self.name, "tokens a rank": f"{self.tokens:,}", "H, I, E, K": shape}

    @property
    def model(self) -> ModelShape:
        return ModelShape(
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_experts=self.experts,
            top_k=self.top_k,
            dtype="bfloat16",
        )

    def plan(self, cluster: ClusterSpec, seed: int = 0) -> TokenPlan:
        """Who computes what, under expert parallelism."""
        even_E = np.full(self.experts, 1 / self.experts)
        numbers = np.random.default_rng(seed)
        load = LoadMatrix(numbers.multinomial(self.tokens * self.top_k, even_E, size=cluster.num_ranks))
        return plan_layer(Strategy(name="ep"), self.model, cluster, load).tokens


@dataclass(frozen=True)
class HopperPart:
    """``seconds``: of a pass forward that all ranks enter together. ``assumed``: what is not published of the layer."""

    what: str
    layer: EvenLayer
    cluster: ClusterSpec
    published_ms: float
    overlap: MegaKernel
    seconds: Callable[[MegaPass], float]
    assumed: str = ""

    def simulated_ms(self, fused_rate: float = 1.0) -> float:
        cluster = self.cluster.replace(fused_rate=fused_rate)
        plan = self.layer.plan(cluster)
        queued = QueuedPass.of(self.overlap, self.layer.model, cluster, plan, backward=False)
        return 1e3 * self.seconds(queued.run(np.zeros(self.cluster.num_ranks)))

    @property
    def words(self) -> dict[str, str]:
        """For tables."""
        return {
            "part": self.what,
            **self.layer.words,
            "cluster": self.cluster.name or "",
            "not published": self.assumed,
        }

    def claim(self) -> Claim:
        """In milliseconds."""
        return Claim(self.words, self.published_ms, scenario=None, own=(self.simulated_ms(),))


def _moved(which: int) -> Callable[[MegaPass], float]:
    """From the first row to the last: of dispatch, 0, or of combine, 1."""
    return lambda found: float(found.moved[which].end_R.max() - found.moved[which].start_R.min())


def _dispatch_and_product(found: MegaPass) -> float:
    return float(found.computed[0].end_R.max() - found.moved[0].start_R.min())


def _whole(found: MegaPass) -> float:
    return float(found.end_R.max())


# The MegaKernel's own tasks, launched one kind after another.
APART = MegaKernel(fused="none", dispatch_share=1, overlap_weight_gradients=False)
_DEDUPLICATED, _FUSED = APART.replace(deduplicate=True), MegaKernel(deduplicate=True)
MEGA_EP_TEST_32K = EvenLayer("mega EP test", 1536, 480, 64, 8, tokens=32768)
_KRAKEN = EvenLayer("Kraken", 4096, 64, 8, 1, tokens=4096)
_H800, _TWO_H100 = presets.h800(), presets.h100().replace(ranks_per_node=2, name="1 x 2 H100")
_BOTH = "dispatch and product"

# Rows that leave as FP8 with their scales, 7,392 B of 7,168 elements, and come home in bfloat16 are this much less than
# rows of bfloat16 both ways, as they are here; so links are as much faster.
_FP8_LINKS = 2 * 14336 / (7392 + 14336)
# DeepGEMM's grouped products in FP8 on H800, mean of two shapes (github.com/deepseek-ai/DeepGEMM pull 73, 2025).
_H200_FP8 = presets.h200().replace(
    name="1 x 8 H200, FP8",
    expert_tflops=(1381 + 1262) / 2,
    intra_node_gb_per_s=_FP8_LINKS * presets.h200().intra_node_gb_per_s,
)
# H20: H100's links, 78 multiprocessors, 4,000 GB/s, and its peak in FP8 (data sheet): nobody publishes a rate reached.
_H20_FP8 = presets.h100().replace(
    name="1 x 8 H20, FP8",
    expert_tflops=296.0,
    multiprocessors=78,
    memory_gb_per_s=4000.0,
    intra_node_gb_per_s=_FP8_LINKS * presets.h100().intra_node_gb_per_s,
)

FITTED_PART = HopperPart(f"{_BOTH}, fused", MEGA_EP_TEST_32K, _H800, 5.9, _FUSED, _dispatch_and_product, "E, I")


def _deep_gemm(layer: tuple[str, int, int, int, int], cluster: ClusterSpec, assumed: str) -> Callable[..., HopperPart]:
    """A whole layer forward in one kernel, at ``tokens`` a rank."""
    return lambda tokens, ms, overlap=_FUSED, what="layer, fused": HopperPart(
        what, EvenLayer(*layer, tokens=tokens), cluster, ms, overlap, _whole, assumed
    )


_V3 = _deep_gemm(("DeepSeek-V3", 7168, 2048, 256, 8), _H200_FP8, "")
_FLASH = _deep_gemm(("V4-Flash", 4096, 2048, 256, 6), _H20_FP8, "rate")
_PRO = _deep_gemm(("V4-Pro", 7168, 3072, 384, 6), _H20_FP8, "rate")
# DeepGEMM's fused kernels, forward of a whole layer. H200: pull 352, a comment, with DeepEP and grouped products beside
# it; H20: pull 383.
HELD_OUT = (
    _V3(1024, 1.2223),
    _V3(2048, 2.0881),
    _V3(4096, 3.8660),
    _V3(8192, 7.4920),
    _FLASH(2048, 2.7351),
    _FLASH(8192, 9.7490),
    _PRO(2048, 6.9860),
    _PRO(8192, 24.7770),
)
_UNFUSED = (_V3(4096, 4.7102, _DEDUPLICATED, "layer, apart"), _V3(8192, 9.1577, _DEDUPLICATED, "layer, apart"))

# Triton-distributed, docs/kernels/nvidia/ep_all2all_fused.rst (commit 1512a811): 8 GPUs, 32k tokens a rank; 201 GB/s in
# 3.5 ms are 8 rows of 1,536 elements a token. Experts and width are its fused test's.
# Kraken, github.com/meta-pytorch/kraken pull 32 (2026): 33.55 MB a rank are one row a token; no experts compute there.
HOPPER_PARTS = (
    HopperPart("dispatch", MEGA_EP_TEST_32K, _H800, 3.5, _DEDUPLICATED, _moved(0), "E"),
    HopperPart(f"{_BOTH}, apart", MEGA_EP_TEST_32K, _H800, 5.9, _DEDUPLICATED, _dispatch_and_product, "E, I"),
    FITTED_PART,
    HopperPart("dispatch", _KRAKEN, _TWO_H100, 0.080064, APART, _moved(0)),
    HopperPart("combine", _KRAKEN, _TWO_H100, 0.083392, APART, _moved(1)),
    *_UNFUSED,
)


def parts_sheet(parts: Sequence[HopperPart] = HOPPER_PARTS) -> Sheet:
    """Kernels that others measured, each beside what is simulated of such a part."""
    notes = (
        "mega EP test: Triton-distributed's documentation, where a token is sent to a rank once; one figure, 5.9 ms, "
        "stands there for dispatch and product in one kernel.",
        "Kraken: its pull request 32, whose times are of the exchange of counts as well, which is not simulated.",
        "layer, apart: DeepEP and DeepGEMM's grouped products, as DeepGEMM's pull request 352 has them.",
    )
    claims = [part.claim() for part in parts]
    return Sheet("SIMULATED beside published: parts of a layer forward, milliseconds", claims, notes)
