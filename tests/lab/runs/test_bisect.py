"""``moesys bisect``: what is planted is found, in its step, layer, tensor and rank; where nothing is, nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from runner_cases import training
from torch import Tensor
from typer.testing import CliRunner

import moesys as ms
from moesys.__main__ import app
from moesys.lab.ranks.pool import LocalRanks
from moesys.lab.train.first_difference import FirstDifference, find_first_difference
from moesys.lab.train.loop import Trainer
from moesys.moe.masters import local_part

STEP, RANK = 2, 1
EP = ms.Strategy(name="ep", reduction=ms.LayoutInvariant(block_rows=16))
FSEP = EP.replace(name="fsep", sharding=ms.Fsep(slots_per_rank=5), balance=ms.Greedy(), split=ms.FlowSplit())
OTHER = EP.replace(name="other", overlap=ms.Pipelined(chunks=2))
WORKLOAD = ms.Training(num_layers=2, context=32, batch=1, warmup=1, steps=3)


# Faults, each planted on a rank where a training is at the step.


def _in_output(trainer: Any, wrong: Callable[[Tensor], None]) -> None:
    trainer.model.blocks[1].moe.experts.register_forward_hook(lambda _module, _inputs, y_TH: wrong(y_TH.detach()))


def _in_gradient_of_output(trainer: Any, wrong: Callable[[Tensor], None]) -> None:
    def hook(gradient: Tensor) -> Tensor:
        wrong(changed := gradient.clone())
        return changed

    attention = trainer.model.blocks[0].attention
    attention.register_forward_hook(lambda _module, _inputs, y: y.register_hook(hook) and None)


def _in_gradient_of_experts(trainer: Any, wrong: Callable[[Tensor], None]) -> None:
    sync = trainer.learner.sync_gradients
    masters = trainer.model.blocks[0].moe.experts.masters
    trainer.learner.sync_gradients = lambda: (sync(), wrong(local_part(masters.grad)[1]))


def _in_norm(trainer: Any, wrong: Callable[[Tensor], None]) -> None:
    clip = Trainer.clip
    changed = patch.object(Trainer, "clip", lambda of: (norm := clip(of), wrong(norm) if of is trainer else None)[0])
    changed.start()


def _in_moments(trainer: Any, wrong: Callable[[Tensor], None]) -> None:
    head = trainer.model.head.weight
    trainer.optimizer.register_step_post_hook(lambda optimizer, *_: wrong(optimizer.state[head]["exp_avg_sq"]))


FAULTS = {
    "output of blocks.1.moe.experts": _in_output,
    "gradient of output of blocks.0.attention": _in_gradient_of_output,
    "gradient of blocks.0.moe.experts.masters": _in_gradient_of_experts,
    "norm of all gradients": _in_norm,
    "exp_avg_sq of head.weight": _in_moments,
}


def find_planted(fault: str, pair: tuple[ms.Strategy, ms.Strategy]) -> FirstDifference | None:
    """On a rank."""
    of = training()
    now = {"step": -1}

    def wrong(tensor: Tensor) -> None:
        if now["step"] == STEP and dist.get_rank() == RANK:
            tensor.view(-1)[0:1].copy_(torch.nextafter(tensor.view(-1)[0:1], torch.tensor(torch.inf)))

    init, step = Trainer.__init__, Trainer.step

    def planted(trainer: Any, strategy: ms.Strategy, *rest: Any) -> None:
        init(trainer, strategy, *rest)
        if fault and strategy == pair[1]:
            FAULTS[fault](trainer, wrong)

    def noted(trainer: Any, number: int) -> Any:
        now["step"] = number
        return step(trainer, number)

    with patch.object(Trainer, "__init__", planted), patch.object(Trainer, "step", noted):
        try:
            return find_first_difference(pair, of.model, of.cluster, WORKLOAD, 0)
        finally:
            patch.stopall()


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault.startswith("output") or "masters" in fault else pytest.param(fault, marks=pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_planted_fault_of_one_bit_is_found(ranks: LocalRanks, fault: str) -> None:
    found, of_other = ranks.run(find_planted, fault, (EP, OTHER), num_ranks=2)
    assert found == of_other
    assert (found.step, found.tensor, found.ranks, found.num_ranks) == (STEP, fault, (RANK,), 2)
    # A rank owns four of eight experts.
    assert (found.num_different, found.largest > 0, found.experts) == (1, True, (5,) if "masters" in fault else ())


def test_where_nothing_is_planted_no_bit_differs(ranks: LocalRanks) -> None:
    assert ranks.run(find_planted, "", (EP, FSEP), num_ranks=2) == [None, None]


@pytest.mark.slow
def test_the_command_finds_where_ordered_sums_part(tmp_path: Path) -> None:
    pair = tuple(strategy.replace(reduction=ms.Ordered()) for strategy in (EP, FSEP))
    run = ms.run(training(strategies=pair, workload=WORKLOAD), tmp_path).path
    first = "ep and fsep, seed 0: the first difference is in step 0, gradient of blocks.1.moe.experts.masters, expert"
    for arguments, code, out, error in (
        (["ep", "fsep"], 1, first, ""),
        (["ep", "ep", "--seed", "0"], 0, "ep and ep, seed 0: no bit differs in 4 steps\n", ""),
        (["ep", "laer"], 2, "", "Error: strategy='laer' is not in trained; choose one of 'ep', 'fsep'\n"),
        (["ep", "fsep", "--seed", "7"], 2, "", "Error: seed=7 is not in trained; choose one of 0\n"),
    ):
        found = CliRunner().invoke(app, ["bisect", str(run), *arguments])
        assert (found.exit_code, found.stdout.startswith(out), found.stderr) == (code, True, error)
