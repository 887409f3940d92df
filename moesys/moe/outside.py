"""OutsideExperts: experts whose parameters a model of another library keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moesys.config import Fsep, MegaKernel, Strategy
from moesys.moe.expert_form import ExpertForm
from moesys.overlap.experts_on_device import OURS, ExpertFunction


@dataclass(frozen=True)
class OutsideExperts:
    """What ``Experts`` need to know of parameters that are not theirs.

    read: gives this rank's part of them whenever it is asked, one tensor for each part of ``form``, ``DTensor`` or not,
        of any floating dtype: with ``Ep`` whole experts [E/R, ...], with ``Fsep`` its slice of all, [E, ...]. They are
        read where they lie, and their gradients, summed over the ranks of the group, come back in their dtype.
    form: the tensors of one expert.
    function: what an expert computes with them.
    add_gradients: adds gradients, in the shapes of what ``read`` gave, to those parameters' own when backward is past
        the layer, as ``Fsep(delay_reshard=True)`` asks for; None where nobody can.
    """

    read: Callable[[], Sequence[Tensor]]
    form: ExpertForm
    function: ExpertFunction = OURS
    add_gradients: Callable[[Sequence[Tensor]], None] | None = None

    def check(self, strategy: Strategy) -> None:
        """Raises ValueError where these experts cannot run under ``strategy``."""
        sharding = strategy.sharding
        if isinstance(strategy.overlap, MegaKernel):
            raise ValueError(
                f"strategy {strategy.name!r} has overlap=MegaKernel, which runs no experts whose parameters are kept "
                "outside; use Sequential() or Pipelined(chunks=...)"
            )
        if isinstance(sharding, Fsep) and sharding.delay_reshard and self.add_gradients is None:
            raise ValueError(
                f"strategy {strategy.name!r} has delay_reshard=True, and who keeps these parameters takes no gradient "
                "later than from backward; use delay_reshard=False, or give OutsideExperts(add_gradients=...)"
            )
