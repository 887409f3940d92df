"""What ranks do under weak memory, and what must come of it: small, as a schedule is to take tens of milliseconds."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from interpreted_ranks import Group, Schedule
from mega_case import Case, Drawn, MegaRun, Results, by_one_process
from side_streams import SideStream
from torch import Tensor

import moesys as ms
from moesys.kernels.mega.arguments import MegaMemory, publish
from moesys.kernels.symmetric.counts import Origin, count_regions, receive_counts, send_counts
from moesys.kernels.symmetric.heap import TIMEOUT_S, Heap, flags_of_ranks
from moesys.kernels.symmetric.pulls import PullPart, PullRings, ordered_sum
from moesys.overlap.mega_executor import MegaHeaps

# When waits run out, if it is not when all wait.
STEPS_BEFORE = range(10, 1200)
CPU = torch.device("cpu")


class WeakCase(NamedTuple):
    """``work`` of a rank on its group, until it has gone so many times; ``differences``: what is wrong with what all
    ranks returned, of which None is no result. ``jumps``: waits run out, None never, 0 where all wait, 1 sometimes.
    """

    num_ranks: int
    work: Callable[[int, Group, float], Any]
    differences: Callable[[list[Any], Schedule], list[str]]
    jumps: int | None = None


def counts(num_ranks: int, exchanges: int = 3) -> WeakCase:
    """Exchanges of counts, one behind the other."""
    experts = 3
    generator = torch.Generator().manual_seed(num_ranks)
    tokens_XRE = torch.randint(1, 9, (exchanges, num_ranks, experts), generator=generator)

    def work(rank: int, group: Group, times: float) -> list[Tensor] | None:
        regions = {**count_regions(num_ranks, experts), "published": flags_of_ranks(num_ranks)}
        memory, found = MegaMemory(Heap.of_group(regions, group, CPU)), []
        for turn, tokens_RE in enumerate(tokens_XRE):
            if turn == times:
                return None
            first_E1 = torch.nn.functional.pad(tokens_RE[rank].cumsum(0), (1, 0)).int()
            send_counts(memory.heap, memory.exchanges_R, first_E1, Origin())
            publish(memory.heap, memory.epoch_1, {})
            counted = receive_counts(memory.heap, memory.epoch_1, memory.exchanges_R, experts)
            found.append(counted.tokens_RE)
            # Where hosts do not look, who was given up goes on, and may be two exchanges ahead.
            assert Schedule.active is not None
            for counted_E, tokens_E in zip(found[-1], tokens_RE, strict=True):
                came = torch.equal(counted_E, tokens_E) or not counted_E.any()
                assert came or Schedule.active.quiet, f"{counted_E} of {tokens_E}"
            memory.watch.note([])
        return found

    def differences(results: list[Any], schedule: Schedule) -> list[str]:
        return [
            f"rank {rank}, exchange {turn}: {found[turn].tolist()}"
            for rank, found in enumerate(results)
            if found is not None
            for turn in range(exchanges)
            if not schedule.is_right(found[turn], tokens_XRE[turn])
        ]

    return WeakCase(num_ranks, work, differences)


def pulls(num_ranks: int, turns: int = 4, elements: int = 10, side: bool = False) -> WeakCase:
    """Each rank shares, and pulls what the others share: more often than a ring is deep, and once from a larger one.
    ``side``: on a stream of their own, as on GPUs.
    """

    def shared(rank: int, turn: int) -> Tensor:
        size = elements * (2 if turn >= turns - 1 else 1)
        return torch.arange(size, dtype=torch.float32) + 100 * rank + 1000 * turn + 1

    def work(rank: int, group: Group, times: float) -> list[Tensor] | None:
        rings, pending, found = PullRings(group), [], []
        for turn in range(turns):
            if turn == times:
                return None
            mine = shared(rank, turn)
            ring = rings.ring("restore", mine.nbytes, CPU, TIMEOUT_S)
            if side and not isinstance(ring.stream, SideStream):
                ring.stream = SideStream()
            parts = mine.new_empty(num_ranks, len(mine) - 1)
            wanted = [PullPart(part, peer, 4) for peer, part in enumerate(parts)]
            pending.append((ring.start(mine, wanted, parts), parts))
            if turn % 2:
                pending[-1][0].wait()
        for pull, parts in pending:
            pull.wait()
            found += [parts, ordered_sum(parts, torch.zeros(num_ranks, dtype=torch.int64), 1)[0]]
        return found

    def differences(results: list[Any], schedule: Schedule) -> list[str]:
        wrong = []
        for turn in range(turns):
            parts = torch.stack([shared(peer, turn)[1:] for peer in range(num_ranks)])
            for rank, found in enumerate(results):
                if found is None:
                    continue
                for value, expected in zip(found[2 * turn :], (parts, parts.sum(0)), strict=False):
                    if not schedule.is_right(value, expected):
                        wrong.append(f"rank {rank}, pull {turn}")
        return wrong

    return WeakCase(num_ranks, work, differences)


def mega(*layers: Case, backward: bool = True) -> WeakCase:
    """Micro-batches of layers that share heaps, each by its case's first point."""

    def work(rank: int, group: Group, times: float) -> list[Results] | None:
        heaps, found = MegaHeaps(group, CPU, TIMEOUT_S), []
        for layer, case in enumerate(layers):
            run = MegaRun(drawn_of(case), rank, heaps)
            call = run.forward(case.points[0])
            if times <= 2 * layer + 1:
                return None
            found.append(run.backward(*call) if backward else {"output": call[1]})
            # A run keeps the memory that it began with.
            del call
            if times <= 2 * layer + 2:
                return None
        return found

    def differences(results: list[Any], schedule: Schedule) -> list[str]:
        return [
            f"rank {rank}, layer {layer}: {name}"
            for rank, found in enumerate(results)
            if found is not None
            for layer, case in enumerate(layers)
            for name, value in found[layer].items()
            if not schedule.is_right(value, expected_of(case, rank)[name])
        ]

    return WeakCase(layers[0].num_ranks, work, differences)


def given_up(case: WeakCase, victim: int | None, goes: int = 1) -> WeakCase:
    """``case``, of which ``victim`` goes only the first times, or, where that is None, waits run out at any time. Who
    returns returns what is right; all others say for whom the first of them waited.
    """

    def work(rank: int, group: Group, times: float) -> Any:
        return case.work(rank, group, goes if rank == victim else times)

    def differences(results: list[Any], schedule: Schedule) -> list[str]:
        errors = {rank: str(result) for rank, result in enumerate(results) if isinstance(result, Exception)}
        wrong = [f"rank {rank} says {error}" for rank, error in errors.items() if not says_what_lacks(error)]
        if victim is not None:
            return wrong + [f"rank {rank} ends well" for rank in range(case.num_ranks) if rank not in {*errors, victim}]
        return wrong + case.differences(
            [None if rank in errors else each for rank, each in enumerate(results)], schedule
        )

    return WeakCase(case.num_ranks, work, differences, 0 if victim is not None else 1)


REPORT = re.compile(r"rank \d waited 30 s for rank \d in \w+: flag \d+( of expert \d+)? is at epoch (\d+), not (\d+);")


def says_what_lacks(message: str) -> bool:
    """A whole report. It need not name who never came: a rank may wait longest for one that itself waits for him."""
    said = REPORT.search(message)
    return said is not None and int(said[2]) < int(said[3])


# Programs of a rank and tiles as small as the kernels take.
SMALL = ms.MegaKernel(programs=3, rows_cap=4.0, tile_rows=16, tile_columns=32, fetch_rows=4, sum_tokens=4)


def layer(tokens: tuple[int, ...], hidden: int = 16, experts: int = 3, seed: int = 0, **of_point: Any) -> Case:
    """Of small sizes; planned by all ranks' devices where ``of_point`` says for how many tokens."""
    split = ms.EvenSplit() if "most_tokens" in of_point else None
    slots = -(-experts // len(tokens)) + experts % 2
    return Case(experts, 2, hidden, 16, "float32", tokens, slots, (SMALL.replace(**of_point),), seed=seed, split=split)


def all_cases() -> dict[str, WeakCase]:
    """By name; those of which some ranks give up come last."""
    tiles = layer((5, 3))
    experts = layer((5, 3), granularity="expert", combine_share=0.5, deduplicate=True, keep_x=False)
    large = layer((11, 10), 40, 2, granularity="expert", combine_share=0.5, fetch_rows=16)
    whole = layer((11, 10), 40, 2, granularity="expert", fetch_rows=16)
    apart = layer((3, 5), seed=1, fused="none", deduplicate=True, overlap_weight_gradients=False)
    again = layer((4, 3), seed=5, keep_x=False)
    planned = layer((5, 3, 4), seed=2, most_tokens=6, reduce_share=0.5)
    going = {
        "counts": counts(3),
        "counts of 2 ranks": counts(2, 2),
        "counts of 4 ranks": counts(4, 2),
        "pulls": pulls(2),
        "two pulls": pulls(2, 2, 3),
        "pulls of 3 ranks": pulls(3),
        "pulls beside": pulls(3, 5, side=True),
        "a token of each": mega(layer((1, 1), experts=2, seed=4), backward=False),
        "tiles": mega(tiles),
        "experts": mega(experts),
        "one kernel after another": mega(apart),
        "two tiles of columns": mega(layer((4, 3), 40, combine_share=0.5)),
        "planned on devices": mega(planned),
        "x again, twice": mega(again, again),
        "several tiles of an expert": mega(large),
        "several tiles of an expert, forward": mega(whole, backward=False),
        "4 ranks, forward": mega(layer((2, 1, 0, 3), granularity="expert"), backward=False),
        "forward twice": mega(tiles, layer((5, 3), seed=3, deduplicate=True), backward=False),
        "growth": mega(tiles, layer((9, 8), seed=1)),
        "growth beside": mega(layer((1, 0, 0), seed=2), layer((2, 0, 0), seed=2)),
    }
    ending = {
        "nobody publishes counts": given_up(counts(3), 1),
        "nobody shares": given_up(pulls(3), 1),
        "no forward": given_up(mega(layer((5, 3, 4)), layer((5, 3, 4), granularity="expert")), 2, 2),
        "no backward": given_up(mega(planned), 2),
        "counts run out": given_up(counts(3), None),
        "pulls run out": given_up(pulls(3), None),
        "tiles run out": given_up(mega(tiles), None),
        "experts run out": given_up(mega(experts), None),
        "planned run out": given_up(mega(planned), None),
    }
    return {**going, **ending}


@cache
def drawn_of(case: Case) -> Drawn:
    return Drawn(case)


@cache
def expected_of(case: Case, rank: int) -> Results:
    return by_one_process(drawn_of(case), rank)


class Shown(NamedTuple):
    """What a schedule shows: what no view orders; wrong bits, or what it ended with; and how many steps it took."""

    by_memory: list[str]
    by_result: list[str]
    steps: int


def run_once(case: WeakCase, seed: int) -> Shown:
    """Where waits run out at any time, in half of the schedules no host looks before the end, as on a GPU."""
    jumps = case.jumps and random.Random(seed).choice(STEPS_BEFORE)
    schedule = Schedule(seed, case.num_ranks, jumps, quiet=case.jumps == 1 and seed % 2 == 1)
    group = Group(case.num_ranks)
    try:
        with patch.object(dist, "get_process_group_ranks", lambda group: list(range(group.size()))):
            wrong = case.differences(schedule.run(lambda rank: case.work(rank, group, math.inf)), schedule)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return Shown(schedule.memory.findings, wrong, schedule.strands.steps)
