"""Faults that are planted into right trainings, each the arithmetic of a public report, and how each must be found."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import qwen3
import small_moe

from moesys.verify.setup import Build


class Fault(NamedTuple):
    """A fault in a training of a host, the situation that shows it, the words that name it, and its first tensor."""

    host: str
    situation: str
    words: str
    first: str

    def build(self, name: str) -> Build:
        if self.host == "small":
            return partial(small_moe.small_moe, fault=name)
        return partial(qwen3.build, host=self.host, fault=name)


EXPERTS = "mlp.experts"
FAULTS = {
    "gradients summed": Fault("ddp", "plain", "summed over 2 data ranks", "all parameters"),
    "router not reduced": Fault("ddp", "plain", "not reduced over the 2 data ranks", "mlp.gate.weight"),
    "auxiliary loss detached": Fault("ddp", "plain", "auxiliary loss counts 0 ×: nothing reaches it", "embed_tokens"),
    "auxiliary loss averaged twice": Fault("fsdp", "plain", "auxiliary loss counts 1/2 ×", "embed_tokens"),
    "auxiliary loss not divided": Fault("fsdp", "uneven", "not divided by the 3 micro-batches", "embed_tokens"),
    "auxiliary loss by tokens": Fault("ddp", "plain", "tokens of the batch", "embed_tokens"),
    "means of ranks": Fault("ddp", "uneven", "means of each rank are averaged", "loss"),
    "padding counted": Fault("ddp", "padding", "in a micro-batch with padding", "loss"),
    "last micro-batch": Fault("fsdp", "uneven", "micro-batch 1 are missing", "all parameters"),
    "tokens lost": Fault("fsdp", "uneven", "tokens of part 1 micro-batch 0 are missing", "loss"),
    "accumulated buffer scaled": Fault("ddp", "uneven", "the accumulated buffer is scaled", "all parameters"),
    "logged twice": Fault("ddp", "plain", "2 ×", "loss"),
    "logged by each rank": Fault("ddp", "plain", "the sum over the ranks is right", "loss"),
    "norm of shards": Fault("fsdp", "plain", "of this rank's shards only", "norm that clips"),
    "norm misses experts": Fault("all_to_all", "plain", "experts of other ranks are missing", "norm that clips"),
    "mean of norms": Fault("all_to_all", "plain", "the mean of the ranks' own norms", "norm that clips"),
    "clipping without effect": Fault("fsdp", "plain", "not scaled", "embed_tokens"),
    "expert gradients x ep": Fault("all_to_all", "plain", "on experts only: summed over 2", EXPERTS),
    "expert gradients divided twice": Fault("all_to_all", "plain", "1/2 × the reference on experts only", EXPERTS),
    "experts halved": Fault("moesys ep", "plain", "1/2 × the reference on experts only", EXPERTS),
    "one expert doubled": Fault("all_to_all", "plain", "experts 1: 2 ×", EXPERTS),
    "gate and up exchanged": Fault("fsdp", "plain", "exchanged halves of the tensor", EXPERTS),
    "experts swapped": Fault("all_to_all", "plain", "experts permuted", EXPERTS),
    "router detached": Fault("all_to_all", "plain", "main loss counts 0 ×: nothing reaches it", "mlp.gate[1]"),
    "weights twice": Fault("all_to_all", "plain", "48 of 48 tokens differ", "layers.0.mlp.experts[0]"),
    "tokens dropped": Fault("all_to_all", "plain", "each of them chose expert", "layers.0.mlp.experts[0]"),
    "no sum in backward": Fault("tp+ep all_reduce", "plain", "a part of a sum", "mlp.gate[1]"),
    "top-k not normalised": Fault("moesys ep", "plain", "not normalised", "layers.0.mlp.gate[1]"),
    "other experts": Fault("ddp", "plain", "choose other experts", "layers.0.mlp.gate[2]"),
    "recomputation draws again": Fault("ddp", "recomputation", "a recomputation chose other experts", "mlp.gate[2]"),
    "no gradient on a rank": Fault("ddp", "plain", "no gradient (None)", "mlp.gate.weight"),
    "embedding drifts": Fault("ddp", "plain", "rank 1: 3/2 ×", "embed_tokens"),
    "rate of the head": Fault("fsdp", "plain", "2 × the reference", "lm_head"),
    "no weight decay": Fault("fsdp", "plain", "weight decay", "embed_tokens"),
    "moments reset": Fault("ddp", "plain", "differs", "embed_tokens"),
    "same data on both ranks": Fault("ddp", "plain", "reads the data of part 0", "embed_tokens"),
    "labels shifted": Fault("ddp", "plain", "other labels", "loss"),
    "head dropped on save": Fault("fsdp", "checkpoint", "in the checkpoint", "lm_head.weight"),
    "saved in rank order": Fault("all_to_all", "checkpoint", "experts permuted", EXPERTS),
    "moments dropped on save": Fault("ddp", "checkpoint", "state of the optimizer", "embed_tokens"),
    "bias in each micro-batch": Fault("small", "uneven", "moved once for each of 3 micro-batches", "gate.bias"),
    "counts doubled by recomputation": Fault("small", "recomputation", "2 forwards, as recomputed", "gate.tokens"),
    "evaluation in training mode": Fault("small", "evaluation", "evaluation changes it", "gate.tokens"),
    "equal masks": Fault("small", "dropout", "equal dropout masks", "[0]"),
    "bias lost on resume": Fault("small", "checkpoint", "in the checkpoint", "gate.bias"),
}
