"""What else the machines of the ranks do meanwhile: who measures beside other work measures that, too."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from moesys.config import ClusterSpec
from moesys.lab.ranks.torchrun_ranks import Ranks
from moesys.lab.runs.environment import available_cores

# Of a machine's cores; more is told. What started the ranks is other work, too, and has less.
MOST_OTHER_WORK = 0.03
STAT = Path("/proc/stat")
# user nice system idle iowait irq softirq steal: steal is other machines' work.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class ProcessorSeconds:
    """On one rank. own: of its process. machine: of everybody on its machine's cores, None where the system does not
    say. wall: by the clock, times the cores that there are.
    """

    own: float
    machine: float | None
    wall: float


def processor_seconds() -> ProcessorSeconds:
    return ProcessorSeconds(time.process_time(), _machine_seconds(), time.perf_counter() * available_cores())


def _machine_seconds() -> float | None:
    if not STAT.exists():
        return None
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in STAT.read_text().splitlines()]
    ticks = sum(int(line[1 + place]) for line in lines if line[0] in mine for place in _BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherWork:
    """Counts from when it is made. Collective."""

    def __init__(self, ranks: Ranks, cluster: ClusterSpec) -> None:
        self._ranks, self._node_R = ranks, cluster.node_of_rank
        self._before = ranks.run(processor_seconds)

    def share(self) -> float:
        """Of the cores' time of the busiest machine, what its ranks did not have; 0 where no system says."""
        spans = list(zip(self._before, self._ranks.run(processor_seconds), strict=True))
        return max(
            _others([span for span, of in zip(spans, self._node_R, strict=True) if of == node])
            for node in set(self._node_R)
        )

    def warnings(self) -> list[str]:
        """Says so where it was too much."""
        share = self.share()
        if share <= MOST_OTHER_WORK:
            return []
        return [f"Other work had {share:.0%} of the cores meanwhile: measure again when there is none."]


def _others(ranks: list[tuple[ProcessorSeconds, ProcessorSeconds]]) -> float:
    before, after = ranks[0]
    if before.machine is None or after.machine is None:
        return 0.0
    own = sum(last.own - first.own for first, last in ranks)
    return max(0.0, (after.machine - before.machine - own) / (after.wall - before.wall))
