"""Which experts tokens choose in the bench of the kernels: the same choices for every contestant.

T tokens, E experts, K distinct choices of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUTINGS = ("uniform", "balanced", "zipf", "k-experts", "router")


def draw_routing(name: str, T: int, E: int, K: int, generator: torch.Generator) -> Tensor:
    """int64 [T, K] on the generator's device, distinct in a row.

    uniform: any K experts. balanced: every expert as often as every other, but for one. zipf: expert i of a random
    order with a probability like 1 / i. k-experts: all tokens the same K. Raises ValueError for another name.
    """
    device = generator.device
    if name == "balanced":
        expert_TK = (torch.arange(T * K, device=device) % E).view(T, K)
        order_E, order_T = (torch.randperm(n, generator=generator, device=device) for n in (E, T))
        return order_E[expert_TK][order_T]
    if name == "k-experts":
        return torch.randperm(E, generator=generator, device=device)[:K].expand(T, K).contiguous()
    weight_E = torch.ones(E, device=device)
    if name == "zipf":
        weight_E /= 1 + torch.randperm(E, generator=generator, device=device)
    elif name != "uniform":
        raise ValueError(f"routing={name!r} cannot be drawn; use uniform, balanced, zipf or k-experts")
    # The K largest of these keys are K draws without putting back (Gumbel-top-k).
    exponential_TE = torch.empty(T, E, device=device).exponential_(generator=generator)
    return (weight_E.log() - exponential_TE.log()).topk(K, dim=1).indices


def choose(x_TH: Tensor, router_EH: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """A usual router in plain torch: softmax in float32, the K largest scaled to sum to 1.

    Returns choices int64 and weights float32, both [T, K].
    """
    score_TE = torch.nn.functional.linear(x_TH, router_EH).float().softmax(dim=1)
    weight_TK, expert_TK = score_TE.topk(K, dim=1)
    return expert_TK, weight_TK / weight_TK.sum(dim=1, keepdim=True)
