"""Published times of kernels like the MegaKernels' parts, on Hopper, beside what the simulator has for such a part.

They are other people's kernels: Triton-distributed's push rows where these pull, Kraken's exchange counts as well. So
this shows how far a part is from anything that was measured, not how fast this project's kernels are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moesys.bench.uniep.rows import APART, MEGA_EP_TEST_32K, Layer, bfloat16_layer, even_plan
from moesys.config import ClusterSpec, MegaKernel, presets
from moesys.simulator.mega.layer_pass import MegaPass, QueuedPass


@dataclass(frozen=True)
class Part:
    """``seconds``: of a pass forward that all ranks enter together. ``assumed``: what is not published of the layer."""

    what: str
    layer: Layer
    cluster: ClusterSpec
    published_ms: float
    overlap: MegaKernel
    seconds: Callable[[MegaPass], float]
    assumed: str = ""

    def simulated_ms(self) -> float:
        plan = even_plan(self.layer, self.cluster)
        queued = QueuedPass.of(self.overlap, self.layer.model, self.cluster, plan, backward=False)
        return 1e3 * self.seconds(queued.run(np.zeros(self.cluster.num_ranks)))


def _moved(which: int) -> Callable[[MegaPass], float]:
    """From the first row to the last: of dispatch, 0, or of combine, 1."""
    return lambda found: float(found.moved[which].end_R.max() - found.moved[which].start_R.min())


def _dispatch_and_product(found: MegaPass) -> float:
    return float(found.computed[0].end_R.max() - found.moved[0].start_R.min())


# Triton-distributed, docs/kernels/nvidia/ep_all2all_fused.rst (commit 1512a811): 8 GPUs, 32k tokens a rank; 201 GB/s in
# 3.5 ms are 8 rows of 1,536 elements a token. Experts and width are its fused test's.
# Kraken, github.com/meta-pytorch/kraken pull 32 (2026): 33.55 MB a rank are one row a token; no experts compute there.
_KRAKEN = bfloat16_layer("Kraken", hidden=4096, width=64, experts=8, top_k=1, tokens=4096)
_TWO_H100 = presets.h100().replace(ranks_per_node=2, name="1 x 2 H100")
_DEDUPLICATED = APART.replace(deduplicate=True)

PARTS = (
    Part("dispatch", MEGA_EP_TEST_32K, presets.h800(), 3.5, _DEDUPLICATED, _moved(0), "E"),
    Part(
        "dispatch and product, apart",
        MEGA_EP_TEST_32K,
        presets.h800(),
        5.9,
        _DEDUPLICATED,
        _dispatch_and_product,
        "E, I",
    ),
    Part(
        "dispatch and product, fused",
        MEGA_EP_TEST_32K,
        presets.h800(),
        5.9,
        MegaKernel(deduplicate=True),
        _dispatch_and_product,
        "E, I",
    ),
    Part("dispatch", _KRAKEN, _TWO_H100, 0.080064, APART, _moved(0)),
    Part("combine", _KRAKEN, _TWO_H100, 0.083392, APART, _moved(1)),
)
