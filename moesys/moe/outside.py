"""OutsideExperts: experts whose parameters a model of another library keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

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
    """

    read: Callable[[], Sequence[Tensor]]
    form: ExpertForm
    function: ExpertFunction = OURS
