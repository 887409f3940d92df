"""A dead rank ends every other rank within its time-out, with an error that names it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Stack
from torch import nn

import moesys as ms
from moesys import collectives
from moesys.collectives import guarded, silent_ranks_named
from moesys.lab.ranks.pool import LocalRanks, RankTimeouts
from moesys.overlap.comm import background
from moesys.overlap.comm.channel import Channel
from moesys.overlap.comm.record import Meter, Recorder

SHAPE = ms.ModelShape(hidden_size=16, intermediate_size=8, num_experts=6, top_k=2)
STRATEGIES = {
    "ep": ms.Strategy(name="ep"),
    "fsep": ms.Strategy(
        name="fsep",
        sharding=ms.Fsep(slots_per_rank=3, prefetch_layers=1, delay_reshard=True),
        balance=ms.Greedy(),
        overlap=ms.Pipelined(chunks=2),
    ),
}
GRACE_S = 1.0
COLLECTIVE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def mortal_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4, timeouts=RankTimeouts(run_s=40, collective_s=COLLECTIVE_TIMEOUT_S)) as pool:
        yield pool


def train_until(victim: int, signal_number: int, strategy: ms.Strategy, linked: bool) -> None:
    """Steps without end; in its third, ``victim`` gets a signal in the middle of its forward."""
    model = Stack(SHAPE, strategy, num_layers=2)
    if linked:
        ms.link(model)
    for moe in model.moe:
        moe.experts.token_channel.failure_grace_s = moe.experts.store.channel.failure_grace_s = GRACE_S
    for step in range(1000):
        x = torch.randn(20, 16)
        if step == 2 and dist.get_rank() == victim:
            model.mixers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal_number))
        model(x).sum().backward()


@pytest.mark.parametrize(
    ("name", "linked", "victim", "signal_number"),
    [
        pytest.param("ep", False, 2, signal.SIGKILL, marks=pytest.mark.slow),
        # One that is alive and silent is named below, always.
        pytest.param("ep", False, 1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("fsep", True, 2, signal.SIGKILL, marks=pytest.mark.slow),
        ("fsep", True, 0, signal.SIGKILL),
        pytest.param("fsep", True, 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["killed", "hung", "linked, killed", "linked, first rank killed", "linked, hung"],
)
def test_a_dead_rank_is_named_by_all_others(
    mortal_ranks: LocalRanks, name: str, linked: bool, victim: int, signal_number: int
) -> None:
    outcomes = mortal_ranks.outcomes(train_until, victim, signal_number, STRATEGIES[name], linked, expect_dead={victim})
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.kind == "raised", outcome
            words = f"rank {victim} did not answer(:| and) (it )?is dead or hung"
            assert re.search(words, outcome.trace), outcome.trace
            # Its time-out, the grace that names the dead, and what a busy machine adds.
            assert outcome.seconds < COLLECTIVE_TIMEOUT_S + GRACE_S + 10


def call_without(victim: int, name: str, folder: str) -> None:
    """Calls ``name`` on all ranks but ``victim``, which is killed in its place."""
    model = Stack(SHAPE, STRATEGIES["ep"], num_layers=1)
    model(torch.randn(20, 16)).sum().backward()
    # The default of calls without a channel; the process ends with this run.
    collectives.FAILURE_GRACE_S = GRACE_S
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    match name:
        case "clip_grad_norm_()":
            ms.clip_grad_norm_(model, 1.0)
        case "link()":
            ms.link(model)
        case "sync_gradients()":
            ms.sync_gradients(model)
        case "whole_folder()":
            with ms.whole_folder(folder):
                pass
        case "Trainer.train()":
            with pytest.raises(RuntimeError, match="no collective"), silent_ranks_named(name):
                raise RuntimeError("no collective")
            with silent_ranks_named(name):
                dist.all_reduce(torch.zeros(1))


# Others always show that forwards name the rank that died, and that sync_gradients() names itself.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["clip_grad_norm_()", "link()", "sync_gradients()", "whole_folder()", "Trainer.train()"]
)
def test_a_call_names_itself_and_the_rank_that_died(mortal_ranks: LocalRanks, name: str, tmp_path: Path) -> None:
    outcomes = mortal_ranks.outcomes(call_without, 2, name, str(tmp_path / "folder"), expect_dead={2})
    for outcome in outcomes:
        if outcome.rank != 2:
            assert f"CollectiveError: rank {outcome.rank}: {name} failed; rank 2 did not answer" in outcome.trace


def fail_twice(victim: int) -> str:
    """A time-out that all ranks catch, and then one is killed."""
    group = dist.new_group([0, 1, 2], timedelta(seconds=1))
    channel = Channel(group, [0] * 3, Recorder(0), Meter())
    channel.failure_grace_s = GRACE_S
    source = int(dist.get_rank() == 0)
    with pytest.raises(ms.CollectiveError):
        channel.guard("first", lambda: dist.recv(torch.zeros(1), group_src=source, group=group, tag=7))
    time.sleep(1.0 + 2 * GRACE_S)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ms.CollectiveError) as error:
        channel.guard("second", lambda: dist.recv(torch.zeros(1), group_src=victim, group=group, tag=8))
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_behind_an_earlier_failure(mortal_ranks: LocalRanks) -> None:
    outcomes = mortal_ranks.outcomes(fail_twice, 2, num_ranks=3, expect_dead={2})
    for outcome in outcomes[:2]:
        assert "second failed; rank 2 did not answer" in str(outcome.result), outcome


def fail_under_another_clock() -> str:
    """All ranks fail together, and the hosts' clocks are hours apart."""
    group = dist.new_group([0, 1], timedelta(seconds=1))
    rank = dist.get_rank()
    with mock.patch("time.time", return_value=time.time() - 36000 * rank), pytest.raises(ms.CollectiveError) as error:
        guarded("call", group, lambda: dist.recv(torch.zeros(1), group_src=1 - rank, group=group, tag=9))
    return str(error.value)


def test_clocks_that_differ_blame_nobody(ranks: LocalRanks) -> None:
    for said in ranks.run(fail_under_another_clock, num_ranks=2):
        assert "call failed; every rank is alive" in said


class FrozenStore:
    """A store whose host is frozen: it never answers."""

    def clone(self) -> FrozenStore:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: threading.Event().wait()


def fail_beside_a_frozen_store() -> list[tuple[str, tuple[int, ...]]]:
    group, said = dist.new_group([0, 1], timedelta(seconds=1)), []
    other = 1 - dist.get_rank()
    places = (collectives, "FAILURE_GRACE_S", 0.1), (collectives, "default_store", FrozenStore)
    places += ((background, "default_store", FrozenStore),)
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place))
        beating = background.Heartbeat(dist.get_rank())
        for having in (None, beating):
            channel = Channel(group, [0, 0], Recorder(0), Meter())
            channel.heartbeat, channel.failure_grace_s = having, 0.1
            with pytest.raises(ms.CollectiveError) as error:
                channel.guard("call", lambda: dist.recv(torch.zeros(1), group_src=other, group=group, tag=9))
            said.append((str(error.value), error.value.silent_ranks))
        beating.close()
    return said


def test_a_frozen_store_ends_the_others_within_their_time_out(ranks: LocalRanks) -> None:
    """Rank 0 hosts the store without a launcher, and may be stopped, or its machine paused."""
    for text, silent in ranks.run(fail_beside_a_frozen_store, num_ranks=2, timeout_s=60.0)[0]:
        assert "call failed; rank 0 did not answer: it is dead or hung" in text
        assert "is gone or does not answer" in text
        assert silent == (0,)


def outlive_the_group(restart: bool, folder: Path) -> dict[str, list[str]]:
    """Returns what calls of a training say by what they must name."""
    group, others = dist.new_group([0, 1]), dist.new_group([0, 1])
    shape = SHAPE.model_copy(update={"scoring_func": "sigmoid", "router_aux_loss_coef": 0.1})
    make = partial(ms.MoELayer, shape, STRATEGIES["ep"], layer_index=5)
    model, alive = (nn.ModuleList([make(group=each)]) for each in (group, dist.group.WORLD))
    balancer, logits_TE = ms.QuantileBalancer(model), torch.randn(20, 6)
    for each in (model, alive):
        each[0](torch.randn(20, 16)).sum().backward()
        each[0](torch.randn(20, 16))
    for each in (group, others):
        dist.destroy_process_group(each)
    if restart:
        dist.new_group([0, 1])
    calls: dict[str, tuple[Callable[[], object], ...]] = {
        "layer 5": (
            lambda: model[0](torch.randn(20, 16)),
            lambda: ms.router_loss(model, over="global_batch"),
            lambda: model.eval()[0](torch.randn(20, 16)),
            lambda: ms.sync_gradients(model),
            lambda: ms.clip_grad_norm_(model, 1.0),
            lambda: ms.link(model),
            lambda: ms.update_router_bias(model, rate=0.1),
            lambda: ms.global_aux_loss(model, [logits_TE]),
            balancer.update,
            lambda: ms.QuantileBalancer(model),
            lambda: ms.PlanningState(model).state_dict(),
            lambda: ms.Watch(model, folder),
            lambda: model[0].full_state_dict(),
            lambda: model[0].experts.foresee([torch.zeros(1, 2, dtype=torch.int64)]),
        ),
        "these parameters": (lambda: ms.clip_grad_norm_(list(model.parameters()), 1.0),),
        "the argument group": (
            lambda: ms.update_router_bias(alive, others, rate=0.1),
            lambda: ms.global_aux_loss(alive, [logits_TE], others),
            lambda: ms.router_loss(alive, over="global_batch", group=others),
        ),
    }
    said: dict[str, list[str]] = {}
    for whose, each in calls.items():
        for call in each:
            with pytest.raises(RuntimeError) as error:
                call()
            said.setdefault(whose, []).append(str(error.value))
    return said


@pytest.mark.parametrize("restart", [False, True], ids=["no group", "another group"])
def test_a_layer_that_outlives_its_process_group_is_named(ranks: LocalRanks, restart: bool, tmp_path: Path) -> None:
    for said in ranks.run(outlive_the_group, restart, tmp_path, num_ranks=2):
        for whose, texts in said.items():
            for text in texts:
                assert text == (
                    f"the process group of {whose} was destroyed (destroy_process_group); make the model again after "
                    "init_process_group, and load the state_dict() of this one"
                )


def evaluate_alone() -> str:
    """Rank 0 runs a layer that the others do not; they fail in another call when it no longer waits for reports."""
    model = Stack(SHAPE, STRATEGIES["ep"], num_layers=1)
    layer = model.moe[0]
    if dist.get_rank() == 0:
        # It fails after one time-out, and waits for reports until 0.5 s after a second one.
        layer.experts.token_channel.failure_grace_s = 0.5
    else:
        time.sleep(2 * COLLECTIVE_TIMEOUT_S + 0.5 + 2.0)
    call = (lambda: layer(torch.randn(20, 16))) if dist.get_rank() == 0 else (lambda: ms.sync_gradients(model))
    with pytest.raises(ms.CollectiveError) as error:
        call()
    return str(error.value)


def test_a_late_rank_is_not_called_dead_for_sure_and_learns_who_waited(mortal_ranks: LocalRanks) -> None:
    waited, *late = mortal_ranks.run(evaluate_alone, num_ranks=3)
    assert "rank 0: forward of layer 0 failed; " in waited
    assert "All ranks of a process group must make the same calls in the same order" in waited
    assert "ranks 1, 2 did not answer and are dead or hung, or late in another part of the program" in waited
    for said in late:
        assert "sync_gradients() failed" in said
        assert "rank 0 failed in forward of layer 0" in said
