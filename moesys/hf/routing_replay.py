"""Router replay: records which experts the routers of a model choose, and has them choose the same experts again.

A rollout engine and a trainer round differently, so some tokens go to other experts in training than in the rollout;
replay removes that difference (arXiv 2510.11370). It knows moesys' own routers and those of transformers. Each of
transformers' routers returns (logits [T, E], weights [T, K], experts [T, K]), and its weights are a function of the
logits at the experts. T tokens, K top-k, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesys.hf.padding import follow_padding, real_tokens
from moesys.moe.experts import experts_of, require_module
from moesys.moe.router import SUM_EPS, Router
from moesys.moe.routing_replay import LIVE, PADDING, ForwardHook, Ids, ReplayableRouter, check_layer, recorded, replayed
from moesys.traces import routes_in

WeightsAt = Callable[[Any, Tensor, Tensor], Tensor]
# The routes of a request as an engine returns them, or a list of pieces, each with the token that it begins at.
Rows = Ids | str | bytes | list[Any]
Routes = Rows | list[tuple[int, Rows]] | None


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[Tensor]]:
    """Records the experts that every router in ``model`` chooses: ``with ms.record_routing(model) as expert_LTK:``.

    Gives a list, which is empty inside of the ``with`` and has after it one [L, T, K] of each micro-batch: L routers in
    the order of ``model.named_modules()``, this rank's T tokens as the routers see them (batch and sequence
    flattened), K top-k in the order of the router. uint8 for up to 256 experts, else int16, on the routers' device.
    Padding, which a mask leaves out (``attention_mask`` [B, S] of transformers' models), has the ids -1, and int16.
    What activation checkpointing runs again is not recorded again.

    Raises ValueError for a router that is not known, by the name of its class, and RuntimeError where routers did not
    run equally often.
    """
    with recorded(routers_of(model)) as expert_LTK:
        yield expert_LTK


@contextmanager
def replay_routing(model: nn.Module, expert_LTK: Ids | Sequence[Ids]) -> Iterator[None]:
    """Makes every router in ``model`` choose the given experts: ``with ms.replay_routing(model, expert_LTK):``.

    ``expert_LTK``: what ``record_routing`` or ``align_routing`` gave, or a tensor or array [L, T, K] of any integer
    dtype; a list of them has one of each micro-batch, in the order in which they are run. Ranks may have different T.
    Tokens that the mask of the micro-batch leaves out may have -1, K times, or any K experts; others may not have -1.
    For a token with -2, K times, the live router chooses.

    Scores are those of the live router; the weights of the given experts are gathered from them, normalised and scaled
    as the router does, and so are differentiable in the tokens and in the router. Correction biases and limits of
    groups count for nothing, and a moesys router's balancing loss is that of the given experts. Outputs are summed in
    the given order of K.

    Activation checkpointing runs again with the experts of the first pass, also after the ``with``; it needs
    ``use_reentrant=False``, and regions inside each other ``context_fn=ms.recompute``.

    Layers with ``predictor=Oracle()`` train inside of it: they plan layouts for the loads that the ids of all ranks
    make, without tokens that have -2. Ranks then enter together, with equally many micro-batches.

    Raises TypeError for another dtype; ValueError for another shape, an id outside of [0, E), an expert twice for one
    token, -1 for a token that is not padding, a router that is not known, and at the end for micro-batches that were
    not run. Where ranks share the experts, ids that one of them refuses are an error on all, in the first forward.
    """
    with replayed(routers_of(model), experts_of(model), expert_LTK):
        yield


def align_routing(model: nn.Module, routes: Sequence[Routes], batch: Tensor | Sequence[int]) -> Tensor:
    """Returns the routes of a rollout as ``replay_routing`` takes them, int16 [L, T, K] on the CPU.

    ``routes``: of each sequence of the batch what an inference engine returned. This is [S - 1, layers, K] for S
    tokens, because the last one was never an input, or [S, layers, K], in any integer dtype: an array, a tensor, nested
    lists, or base64, of an .npy file (vLLM) or of int32 alone (SGLang). ``layers`` are the L with a router, or all of
    the model's ``config``, of which the others are left out. Pieces are a list of tuples (index of the first token,
    rows), of which later ones replace earlier ones. None is a sequence without routes. Rows of -1 are tokens without a
    route, such as those of a prefix cache. Tokens without a route get -2: the live router chooses.

    ``batch``: the attention mask [B, S] of a padded batch, whose padding gets -1 and may be on both sides; or the
    lengths of sequences that are packed one after another.

    Raises ValueError, which names sequence, piece and row, for routes that do not fit the sequence or the model, and
    for an expert twice.
    """
    config: Any = getattr(model, "config", None)
    routers = routers_of(model)
    num_layers = config.get_text_config().num_hidden_layers if hasattr(config, "get_text_config") else len(routers)
    given = torch.as_tensor(batch).cpu()
    lengths = given.bool().sum(dim=1) if given.dim() == 2 else given
    if len(routes) != len(lengths):
        raise ValueError(f"routes has {len(routes)} entries for {len(lengths)} sequences; give None for one without")
    of_sequences = [
        _aligned(each, length, f"routes[{index}]", routers, num_layers)
        for index, (each, length) in enumerate(zip(routes, lengths.tolist(), strict=True))
    ]
    expert_TLK = torch.cat(of_sequences)
    if given.dim() == 2:
        expert_NLK = expert_TLK.new_full((given.numel(), *expert_TLK.shape[1:]), PADDING)
        expert_NLK[given.flatten().bool()] = expert_TLK
        expert_TLK = expert_NLK
    return expert_TLK.transpose(0, 1).contiguous()


def _aligned(routes: Routes, length: int, what: str, routers: Sequence[ReplayableRouter], num_layers: int) -> Tensor:
    """Returns the routes of one sequence, [S, L, K], -2 for tokens without one."""
    expert_SLK = torch.full((length, len(routers), routers[0].top_k), LIVE, dtype=torch.int16)
    if routes is None:
        return expert_SLK
    in_pieces = isinstance(routes, list) and all(isinstance(each, tuple) for each in routes)
    for index, (first, rows) in enumerate(routes if in_pieces else [(0, routes)]):
        place = f"{what}[{index}]" if in_pieces else what
        expert_RLK = _rows(rows, place, routers, num_layers)
        end = first + len(expert_RLK)
        if not 0 <= first <= end <= length or not (in_pieces or end >= length - 1):
            raise ValueError(
                f"{place} has rows for the tokens {first} to {end - 1}, and the sequence has {length}; give a row of "
                "each token but the last, or a list of pieces, (index of the first token, rows)"
            )
        for layer, router in enumerate(routers):
            check_layer(
                expert_RLK[:, layer], f"{place}, row {{}}, layer {layer},".format, router.name, router.num_experts
            )
        has_route_RL = (expert_RLK >= 0).all(dim=2)
        expert_SLK[first:end][has_route_RL] = expert_RLK[has_route_RL].short()
    return expert_SLK


def _rows(rows: Any, place: str, routers: Sequence[ReplayableRouter], num_layers: int) -> Tensor:
    """Returns the ids in one piece, int64 [rows, L, K]."""
    L, K = len(routers), routers[0].top_k
    try:
        ids = routes_in(rows.cpu() if isinstance(rows, Tensor) else rows, (num_layers, K))
        if ids.shape[1] not in (L, num_layers) or ids.shape[2] != K:
            raise ValueError(f"they have shape {ids.shape}")
    except ValueError as error:
        raise ValueError(
            f"{place} holds no routes: {error}; give [tokens, layers, K] with K={K} and the {L} layers of the routers "
            f"{routers[0].name} to {routers[-1].name}, or all {num_layers}"
        ) from None
    if ids.shape[1] != L:
        ids = ids[:, [int(re.findall(r"\d+", router.name)[0]) for router in routers]]
    return torch.from_numpy(ids)


def routers_of(model: nn.Module) -> list[ReplayableRouter]:
    """Returns the routers in ``model``, in the order of its modules.

    Raises ValueError for an unknown router or a model without any, and TypeError if ``model`` is not a module.
    """
    require_module(model)
    follow_padding(model)
    routers = []
    for name, module in model.named_modules():
        if isinstance(module, Router):
            routers.append(ReplayableRouter.of(name, module))
        elif (weights_at := _weights_at(module)) is not None:
            hook = partial(_hook, module, weights_at)
            routers.append(ReplayableRouter(name, module.num_experts, module.top_k, hook))
        elif "experts" in module._modules:
            _check_block(name, module)
    if not routers:
        raise ValueError(f"{type(model).__name__} has no router; known are {_known()}")
    return routers


def _weights_at(module: nn.Module) -> WeightsAt | None:
    """Returns the function for a known router or a subclass of one, which FSDP makes of the modules that it wraps."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.models.") and kind.__name__ in WEIGHTS_AT:
            return WEIGHTS_AT[kind.__name__]
    return None


def _check_block(name: str, block: nn.Module) -> None:
    """Raises ValueError where a module with experts has no router that is known."""
    if any(isinstance(child, Router) or _weights_at(child) is not None for child in block.modules()):
        return
    router = block._modules.get("gate", block._modules.get("router"))
    found = "neither gate nor router" if router is None else type(router).__name__
    raise ValueError(
        f"{name} has experts, but no router that can be recorded or replayed ({found}); known are {_known()}"
    )


def _known() -> str:
    return ", ".join([f"moesys' {Router.__name__}", *WEIGHTS_AT])


def _hook(router: nn.Module, weights_at: WeightsAt, choose: Callable[[Tensor], Tensor]) -> ForwardHook:
    def change(output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits_TE, _, live_TK = output
        mask_T = real_tokens(live_TK)
        shown_TK = live_TK if mask_T is None else live_TK.masked_fill(~mask_T[:, None], -1)
        if (told_TK := choose(shown_TK)) is shown_TK:
            return output
        expert_TK = torch.where(told_TK < 0, live_TK, told_TK)
        # An id -1 of a real token, which experts refuse, stays.
        return logits_TE, weights_at(router, logits_TE, expert_TK), torch.where(shown_TK < 0, expert_TK, told_TK)

    return ForwardHook(router, change)


# --- weights at experts, by family: dtypes and order of operations are those of the family's router ---


def _softmax_divided_by_sum(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK)
    return weight_TK / weight_TK.sum(dim=1, keepdim=True)


def _softmax(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK)
    if router.norm_topk_prob:
        weight_TK = weight_TK / weight_TK.sum(dim=1, keepdim=True)
    return weight_TK.to(logits_TE.dtype)


def _softmax_scaled(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    return logits_TE.softmax(dim=1, dtype=torch.float32).gather(1, expert_TK) * router.routed_scaling_factor


def _sigmoid_scaled(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    weight_TK = logits_TE.sigmoid().gather(1, expert_TK)
    if router.norm_topk_prob:
        weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + SUM_EPS)
    return weight_TK * router.routed_scaling_factor


def _softmax_of_chosen(router: Any, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
    chosen_TK = logits_TE.gather(1, expert_TK)
    return chosen_TK.softmax(dim=1, dtype=chosen_TK.dtype)


WEIGHTS_AT: dict[str, WeightsAt] = {
    "MixtralTopKRouter": _softmax_divided_by_sum,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "DeepseekV2TopkRouter": _softmax_scaled,
    "DeepseekV3TopkRouter": _sigmoid_scaled,
    "Glm4MoeTopkRouter": _sigmoid_scaled,
    "GptOssTopKRouter": _softmax_of_chosen,
}
