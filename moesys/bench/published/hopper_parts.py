"""Published times of kernels like the MegaKernels' parts, on Hopper, beside what the simulator has for such a part.

They are other people's kernels: Triton-distributed's push rows where these pull, Kraken's exchange counts as well. So
this shows how far a part is from anything that was measured, not how fast this project's kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moesys.bench.harness.sheets import Sheet
from moesys.bench.published.claims import Claim
from moesys.config import ClusterSpec, MegaKernel, ModelShape, Strategy, presets
from moesys.layout import TokenPlan
from moesys.load import LoadMatrix
from moesys.simulator.mega.layer_pass import MegaPass, QueuedPass
from moesys.step import plan_layer


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

    def simulated_ms(self) -> float:
        plan = self.layer.plan(self.cluster)
        queued = QueuedPass.of(self.overlap, self.layer.model, self.cluster, plan, backward=False)
        return 1e3 * self.seconds(queued.run(np.zeros(self.cluster.num_ranks)))

    def claim(self) -> Claim:
        """In milliseconds."""
        of = {"part": self.what, **self.layer.words, "cluster": self.cluster.name or "", "not published": self.assumed}
        return Claim(of, self.published_ms, scenario=None, own=(self.simulated_ms(),))


def _moved(which: int) -> Callable[[MegaPass], float]:
    """From the first row to the last: of dispatch, 0, or of combine, 1."""
    return lambda found: float(found.moved[which].end_R.max() - found.moved[which].start_R.min())


def _dispatch_and_product(found: MegaPass) -> float:
    return float(found.computed[0].end_R.max() - found.moved[0].start_R.min())


# The MegaKernel's own tasks, launched one kind after another.
APART = MegaKernel(fused="none", dispatch_share=1, overlap_weight_gradients=False)
_DEDUPLICATED, _FUSED = APART.replace(deduplicate=True), MegaKernel(deduplicate=True)
MEGA_EP_TEST_32K = EvenLayer("mega EP test", 1536, 480, 64, 8, tokens=32768)
_KRAKEN = EvenLayer("Kraken", 4096, 64, 8, 1, tokens=4096)
_H800, _TWO_H100 = presets.h800(), presets.h100().replace(ranks_per_node=2, name="1 x 2 H100")
_BOTH = "dispatch and product"

# Triton-distributed, docs/kernels/nvidia/ep_all2all_fused.rst (commit 1512a811): 8 GPUs, 32k tokens a rank; 201 GB/s in
# 3.5 ms are 8 rows of 1,536 elements a token. Experts and width are its fused test's.
# Kraken, github.com/meta-pytorch/kraken pull 32 (2026): 33.55 MB a rank are one row a token; no experts compute there.
HOPPER_PARTS = (
    HopperPart("dispatch", MEGA_EP_TEST_32K, _H800, 3.5, _DEDUPLICATED, _moved(0), "E"),
    HopperPart(f"{_BOTH}, apart", MEGA_EP_TEST_32K, _H800, 5.9, _DEDUPLICATED, _dispatch_and_product, "E, I"),
    HopperPart(f"{_BOTH}, fused", MEGA_EP_TEST_32K, _H800, 5.9, _FUSED, _dispatch_and_product, "E, I"),
    HopperPart("dispatch", _KRAKEN, _TWO_H100, 0.080064, APART, _moved(0)),
    HopperPart("combine", _KRAKEN, _TWO_H100, 0.083392, APART, _moved(1)),
)


def parts_sheet(parts: Sequence[HopperPart] = HOPPER_PARTS) -> Sheet:
    """Kernels that others measured, each beside what is simulated of such a part."""
    notes = (
        "mega EP test: Triton-distributed's documentation, where a token is sent to a rank once; one figure, 5.9 ms, "
        "stands there for dispatch and product in one kernel.",
        "Kraken: its pull request 32, whose times are of the exchange of counts as well, which is not simulated.",
    )
    claims = [part.claim() for part in parts]
    return Sheet("SIMULATED beside published: parts of a layer forward, milliseconds", claims, notes)
