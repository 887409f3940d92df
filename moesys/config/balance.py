"""Balance: a layout from history."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from moesys.config.member import Member


class Balance(Member):
    """A layout from history. Extend it for a planner of your own: its fields, and ``layout``. Members of moesys have
    none: ``plan_layout`` tells them apart by ``kind``.
    """

    union: ClassVar[str] = "balance"
    method: ClassVar[str] = "layout"

    # Any: a ``PlanningProblem`` in, an ``ExpertLayout`` out, which stand on floors above what is declared.
    def layout(self, problem: Any) -> Any:
        """Returns an ``ExpertLayout`` for a ``PlanningProblem``, [R, S] with S the slots of the widest rank: every
        expert at least once, none twice on one rank, and on no rank more than its slots.

        It is a pure function: of ``problem`` and its fields alone, on whichever rank it is called.
        """
        raise NotImplementedError(f"{type(self).__name__}() is planned for by ms.plan_layout")


class RecordedBalance(Balance):
    """A class of somebody's own as a record names it, whose code is not here."""

    model_config = ConfigDict(extra="allow")

    def layout(self, problem: Any) -> Any:
        raise NotImplementedError(f"{self.kind} is named by a record, and a record is run by nobody")


Balance.recorded = RecordedBalance


class Static(Balance):
    """The same layout for ever: experts in order over the slots."""

    kind: Literal["static"] = "static"


class Eplb(Balance):
    """DeepSeek's EPLB: replicate the heaviest expert per replica, then pack the heaviest first.

    ``hierarchical``: groups of experts are packed to nodes first, and an expert's replicas stay inside one node.
    """

    kind: Literal["eplb"] = "eplb"
    num_groups: int = Field(
        1, ge=1, description="groups of consecutive experts; hierarchical only, a multiple of nodes"
    )
    hierarchical: bool = Field(False, description="groups to nodes, replicas inside a node, then ranks")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_groups > 1 and not self.hierarchical:
            raise ValueError(
                f"num_groups={self.num_groups} means nothing to EPLB's global form; "
                "use hierarchical=True or num_groups=1"
            )
        return self


class Laer(Balance):
    """LAER-MoE's planner: candidate replica counts, placement that spreads over nodes, the cheaper one by its cost."""

    kind: Literal["laer"] = "laer"
    candidates: tuple[Literal["even", "proportional"], ...] = Field(("even", "proportional"), min_length=1)


class FlexMoe(Balance):
    """FlexMoE (arXiv 2304.03946) as a baseline: a few expand and shrink moves from the layout in force."""

    kind: Literal["flex_moe"] = "flex_moe"
    max_moves: int = Field(10, ge=0, description="replicas that change from one plan to the next")


Within = Literal["cluster", "node", "domain"]
MinReplicas = Annotated[int, Field(ge=1, description="replicas of every expert, on distinct ranks")]
ReplicasWithin = Annotated[Within, Field(description="all replicas of an expert lie inside one of these")]


class Greedy(Balance):
    """Ours: replicas on distinct ranks, spread over nodes, improved by local search; anytime and monotone in its work.

    With ``deadline_ms`` two ranks may plan differently. Their layouts still agree, for one rank plans and broadcasts,
    but runs do not repeat bit by bit.
    """

    kind: Literal["greedy"] = "greedy"
    effort: int = Field(1, ge=0, description="multiples of the default work, in iterations and never by a clock")
    min_replicas: MinReplicas = 1
    replicas_within: ReplicasWithin = "cluster"
    max_moves: int | None = Field(
        None, ge=0, description="replicas that may differ from the previous layout; None: all"
    )
    move_tokens: int = Field(
        0, ge=0, description="what a moved replica costs, in tokens of the busiest rank over a plan's life"
    )
    drift: float = Field(
        0.02, ge=0, le=1, description="share of experts' popularity that is drawn anew until a plan is used"
    )
    deadline_ms: float | None = Field(
        None, gt=0, description="the search ends after so much time; then runs do not repeat bit by bit"
    )


class CpSat(Balance):
    """OR-Tools CP-SAT on the joint placement and split, hinted by ``Greedy`` and never worse than it; R × E <= 4096."""

    kind: Literal["cp_sat"] = "cp_sat"
    deterministic_time: float = Field(2.0, gt=0, description="CP-SAT's work limit, in its deterministic seconds")
    min_replicas: MinReplicas = 1
    replicas_within: ReplicasWithin = "cluster"


class MoonEp(Balance):
    """MoonEP as a baseline: experts at home, and loads made exactly equal by copies; for ``lag=0``.

    A rank needs twice the slots of the experts that live there.
    """

    kind: Literal["moon_ep"] = "moon_ep"


class Llep(Balance):
    """LLEP (arXiv 2601.17111) as a baseline: experts at home up to a cap, the rest to the least loaded ranks; for
    ``lag=0``.
    """

    kind: Literal["llep"] = "llep"
    alpha: float = Field(1.0, ge=1, description="cap of a rank, in means")
    min_tokens: int = Field(
        1024, ge=1, description="the least chunk that a copy is made for, but the last of an expert"
    )
    skip_below: float = Field(1.3, ge=0, description="all stay at home where experts' max/mean is less")


class UltraEp(Balance):
    """UltraEP (arXiv 2606.04101) as a baseline: experts at home, copies inside a domain, the least threshold that a
    greedy reaches; for ``lag=0``.
    """

    kind: Literal["ultra_ep"] = "ultra_ep"
    tolerance: float = Field(0.01, ge=0, description="above the mean, of the first threshold tried")
    min_tokens: int = Field(1024, ge=1, description="the least piece, where a threshold has to be searched for")


class FasterMoe(Balance):
    """FasterMoE's shadowing (PPoPP 2022) as a baseline: the hottest experts on all ranks, by its own cost model; for
    ``lag=0``.

    Sizes are those of the model where it is known.
    """

    kind: Literal["faster_moe"] = "faster_moe"
    gb_per_s: float = Field(6.25, gt=0, description="of a rank's link, GB/s")
    tflops: float = Field(11.5, gt=0, description="of a rank, TFLOP/s")
    hidden_size: int = Field(2048, ge=1, description="elements of a row")
    intermediate_size: int = Field(4096, ge=1, description="width of an expert")


# Those whose plan says who computes how many tokens of which source: ``Quotas`` divides tokens so.
WithQuotas = MoonEp | Llep | UltraEp | FasterMoe

# Only now are its members known.
Balance.model_rebuild(force=True)
