"""The training loop: one strategy, one seed, one ``StepResult`` a step.

What is equal to the last bit: losses of strategies that differ in their overlap, prefetch, delay or restore, or in
recomputation, and losses from run to run. Between layouts (FSEP or lent replicas against EP) there are two sums in
another order: weight gradients over the replicas of an expert, and the squares of expert gradients in the norm that
clips. In float32 the losses then agree to about seven digits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from moesys.balance.plan import LayerPlan
from moesys.collectives import device_of, guarded, meet
from moesys.config import ClusterSpec, ModelShape, Strategy
from moesys.config.workload import ModelTraining, Training
from moesys.lab.ranks.process import rank_device
from moesys.lab.train.language_model import ByteLearner
from moesys.lab.train.text import Text
from moesys.load import IntArray
from moesys.moe.gradients import clip_grad_norm_
from moesys.moe.muon import Muon
from moesys.moe.router_bias import update_router_bias
from moesys.moe.runtime import MoERuntime

if TYPE_CHECKING:
    from moesys.lab.train.model_learner import ModelLearner


@dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on every rank.

    step: 0-based, warm-up included. ``timed``: False for warm-up steps.
    loss: mean cross entropy, nats a token, over all ranks and micro-batches, added in rank order in float64.
    step_ms: the slowest rank's wall time for forward, backward, gradient sync and optimizer.
    exposed_ms: time blocked by communication in the MoE layers, mean over ranks.
    plan_ms: the slowest rank's planning on the critical path: split and routes, without the exchange of counts.
    restored_mib: received to have experts, over all ranks and layers.
    load_max_over_mean: the busiest rank's tokens over the mean, mean over layers and micro-batches.
    router_entropy: how evenly a layer's tokens are spread over experts, mean over layers: the entropy of the mean
        routing distribution, which is the experts' shares of ``tokens_LE``, divided by log E. 1 is even.
    tokens_LE: tokens of each expert, by layer, over ranks and micro-batches.
    loads_MLRE: tokens by micro-batch, layer, source rank and expert.
    """

    step: int
    timed: bool
    loss: float
    step_ms: float
    exposed_ms: float
    plan_ms: float
    restored_mib: float
    load_max_over_mean: float
    router_entropy: float
    tokens_LE: list[list[int]]
    loads_MLRE: list[list[list[list[int]]]]


def train(
    strategy: Strategy,
    model: ModelShape,
    cluster: ClusterSpec,
    workload: Training | ModelTraining,
    seed: int,
    group: dist.ProcessGroup | None = None,
) -> Iterator[StepResult]:
    """Trains on every rank of ``group`` (or of the default group, or alone), one step for each result that is taken.

    ``seed`` gives data and initial weights, the same for every strategy. Every rank must take the same results: a
    collective. What training holds is freed at its end, also where the iterator is closed early or raises.

    Raises ValueError where strategy, model, cluster and workload do not fit, or ranks have different text.
    """
    trainer = Trainer(strategy, model, cluster, workload, seed, group)
    try:
        for step in range(workload.warmup + workload.steps):
            yield trainer.step(step)
    finally:
        trainer.close()


class Trainer:
    """A model, its optimizer and its runtime during one training; ``train`` is the usual way to use it."""

    def __init__(
        self,
        strategy: Strategy,
        shape: ModelShape,
        cluster: ClusterSpec,
        workload: Training | ModelTraining,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.workload, self.seed = workload, seed
        self.device = rank_device(workload.device)
        self.learner: ByteLearner | ModelLearner
        if isinstance(workload, Training):
            self.learner = ByteLearner(shape, strategy, cluster, workload, seed, group, self.device)
        else:
            # This import is here because it imports transformers, which not every training needs.
            from moesys.lab.train.model_learner import ModelLearner

            self.learner = ModelLearner(strategy, cluster, workload, seed, group, self.device)
        self.model = self.learner.model
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        # This is the first collective: if a rank has failed, the others learn it before they wait for a new group.
        self.text = self._agreed(self.learner.text)
        self.runtime = self.learner.link()
        # Parameters are of several meshes, or no DTensors: foreach takes no mixture.
        options: dict[str, Any] = {"lr": workload.learning_rate, "weight_decay": 0.0}
        self.optimizer: Optimizer
        if workload.optimizer == "muon":
            adamw = {"weight_decay": 0.0, "foreach": False}
            self.optimizer = Muon(self.model, **options, adjust_lr_fn="match_rms_adamw", adamw=adamw)
        else:
            self.optimizer = torch.optim.Adam(self.model.parameters(), **options, foreach=False)
        if isinstance(workload, Training) and workload.interpret:
            _compute_by_kernels(self.runtime)

    def close(self) -> None:
        self.runtime.close()

    def step(self, step: int) -> StepResult:
        """Runs one optimizer step."""
        workload = self.workload
        batches = [
            self.text.batch(
                step, micro_batch, self.rank, seed=self.seed, batch=workload.batch, context=workload.context
            )
            for micro_batch in range(workload.micro_batches)
        ]
        if self.group is not None:
            # Ranks begin together, or the lateness of one would count as the others' exposed communication.
            guarded("the start of a training step", self.group, partial(dist.barrier, self.group))
        begin_ns = time.perf_counter_ns()
        loss, plans_ML = self._update(batches)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        step_ms = (time.perf_counter_ns() - begin_ns) / 1e6
        return self._result(step, step_ms, loss, plans_ML)

    def _update(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, list[list[LayerPlan]]]:
        """Trains on the micro-batches of a step. Returns this rank's part of the mean loss, and all plans."""
        num_ranks = self.runtime.layers[0].token_channel.num_ranks
        num_tokens = num_ranks * sum(targets_BC.numel() for _, targets_BC in batches)
        loss = 0.0
        plans_ML = []
        self.optimizer.zero_grad()
        for inputs_BC, targets_BC in batches:
            nats_N, router_loss = self.learner.losses(inputs_BC.to(self.device), targets_BC.to(self.device))
            part = nats_N.double().sum() / num_tokens
            # Gradients are summed over ranks and micro-batches, and each has a router loss that is a mean already.
            self.learner.backward(part + router_loss / (num_ranks * len(batches)))
            loss += part.item()
            plans_ML.append([layer.last_plan for layer in self.runtime.layers if layer.last_plan is not None])
        self.runtime.check()
        self.learner.sync_gradients()
        self.clip()
        self.optimize()
        return loss, plans_ML

    def clip(self) -> Tensor:
        """Clips gradients, which are whole by now; returns their norm before."""
        return clip_grad_norm_(self.model, self.workload.max_grad_norm)

    def optimize(self) -> None:
        self.optimizer.step()
        # transformers' models declare no rate, and their biases stay as they are.
        update_router_bias(self.model, rate=None if isinstance(self.workload, Training) else 0.0)

    def _result(self, step: int, step_ms: float, loss: float, plans_ML: list[list[LayerPlan]]) -> StepResult:
        layers = self.runtime.metrics()
        sums = [sum(getattr(layer, name) for layer in layers) for name in ("exposed_ms", "plan_ms", "restored_mib")]
        mine = np.array([loss, step_ms, *sums], dtype=np.float64)
        by_rank = meet("the comparison of a training's numbers", self.group, device_of(self.group), mine.tobytes())
        numbers_5R = np.array([np.frombuffer(each) for each in by_rank]).T.tolist()
        loss_R, step_ms_R, exposed_ms_R, plan_ms_R, restored_mib_R = numbers_5R
        # Counts are known to every rank since they were exchanged to plan with.
        loads_MLRE = np.array([[plan.load.tokens_RE for plan in plans] for plans in plans_ML])
        tokens_LE = loads_MLRE.sum(axis=(0, 2))
        return StepResult(
            step=step,
            timed=step >= self.workload.warmup,
            loss=sum(loss_R),
            step_ms=max(step_ms_R),
            exposed_ms=sum(exposed_ms_R) / len(exposed_ms_R),
            plan_ms=max(plan_ms_R),
            restored_mib=sum(restored_mib_R),
            load_max_over_mean=float(np.mean([plan.tokens.max_over_mean for plans in plans_ML for plan in plans])),
            router_entropy=_relative_entropy(tokens_LE),
            tokens_LE=tokens_LE.tolist(),
            loads_MLRE=loads_MLRE.tolist(),
        )

    def _agreed(self, text: Text) -> Text:
        """Returns the part of ``text`` to train on, after a check that all ranks have the same text."""
        mine = text.fingerprint.encode()
        first, *others = meet("the comparison of a training's text", self.group, device_of(self.group), mine)
        if differing := [rank for rank, other in enumerate(others, start=1) if other != first]:
            raise ValueError(
                f"rank {differing[0]} has another text than rank 0; give every host the same data and tokenizer, and "
                "for the built-in text the same release of Python"
            )
        return text.training_part()


def _compute_by_kernels(runtime: MoERuntime) -> None:
    """Raises ValueError where Triton would compile them."""
    # This import is here so that Triton's kernels are loaded only where they run.
    from moesys.kernels.experts.products import INTERPRETED
    from moesys.overlap.experts_triton import TritonExperts

    if not INTERPRETED.value:
        raise ValueError(
            "interpret=True runs kernels in Triton's interpreter, and here they are compiled; start Python with "
            "TRITON_INTERPRET=1, or use interpret=False"
        )
    for layer in runtime.layers:
        layer.expert_compute = TritonExperts()


def _relative_entropy(tokens_LE: IntArray) -> float:
    """Returns the entropy of the shares of each row divided by log E, the mean over rows; 1 for a single expert."""
    if tokens_LE.shape[1] == 1:
        return 1.0
    share_LE = tokens_LE / tokens_LE.sum(axis=1, keepdims=True)
    # An expert without tokens adds nothing: 0 log 0 = 0.
    nats_LE = -share_LE * np.log(np.where(share_LE > 0, share_LE, 1))
    return float(nats_LE.sum(axis=1).mean() / math.log(tokens_LE.shape[1]))
