"""Padding of transformers' models: which tokens of a call are real, as its ``attention_mask`` says.

A block gives experts and routers its tokens without the mask. So hooks on the innermost model around them keep the mask
for as long as the model runs, and a checkpointed region keeps it for its recomputation in backward.

B sequences of S tokens, T = B·S.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from moesys.hf.experts_module import is_experts
from moesys.moe.call import running_tape

FOLLOWED = "moesys_padding_followed"


class _Call:
    """A call of a model that runs, with its arguments."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    @cached_property
    def mask_T(self) -> Tensor | None:
        """Returns False for padding, bool [T]; None if there is none, or none is known. Computed where experts or
        routers ask, as the host waits for it.
        """
        return _mask_in(self._given)


_call: ContextVar[_Call | None] = ContextVar("moesys_model_call", default=None)


@torch.compiler.disable
def real_tokens(x_TH: Tensor) -> Tensor | None:
    """Returns which tokens are real among those that a model has given to one of its experts modules or routers, bool
    [T]; None for all, or if no padding is known.
    """
    call, tape = _call.get(), running_tape()
    if tape is not None and tape.mode == "replay":
        mask_T = tape.mask_T
    else:
        mask_T = None if call is None else call.mask_T
        if tape is not None:
            tape.mask_T = mask_T
    # Other tokens than those of the call, such as one modality's.
    return None if mask_T is None or len(mask_T) != len(x_TH) else mask_T.to(x_TH.device)


def follow_padding(model: nn.Module) -> None:
    """Makes the masks of calls known to the experts and routers in ``model``."""
    models: list[nn.Module] = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    for each in reversed(models or [model]):
        _follow(each, each.modules())


def _follow(model: nn.Module, inside: Iterable[nn.Module]) -> None:
    """Adds the hooks to ``model`` if there are experts ``inside`` of it and no model with hooks."""
    inside = [*inside, model]
    if any(map(is_experts, inside)) and not any(FOLLOWED in each.__dict__ for each in inside):
        model.__dict__[FOLLOWED] = True
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)


def _follow_new(module: nn.Module, _: str, inner: nn.Module | None) -> None:
    if isinstance(module, PreTrainedModel) and inner is not None:
        _follow(module, inner.modules())


# transformers shards a model while it loads it, and gives an ``EPImplementation`` its experts alone.
register_module_module_registration_hook(_follow_new)


@torch.compiler.disable
def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(zip(signature(model.forward).parameters, args, strict=False)) | kwargs
    kept = {name: given.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds")}
    # A call that Ctrl-C ended has not come to ``_end``, so nothing is kept of the one before.
    _call.set(_Call(kept))


@torch.compiler.disable
def _end(*_: object) -> None:
    _call.set(None)


def _mask_in(given: dict[str, Any]) -> Tensor | None:
    """Returns the mask in the arguments of a call, if it is [B, S] and leaves a token out. Its last columns are those
    of the call's tokens, where a cache has the others.
    """
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.dim() != 2:
        return None
    mask_BS = mask[:, max(mask.shape[1] - tokens.shape[1], 0) :].bool()
    if mask_BS.shape != tokens.shape[:2] or mask_BS.all():
        return None
    # A mask for a whole cache has other columns last than those of these tokens.
    return mask_BS.flatten() if mask.shape[1] == tokens.shape[1] or mask_BS.any() else None
