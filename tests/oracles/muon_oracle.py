"""torch.optim.Muon, matrix by matrix: each matrix of a model is a parameter of its own, with the model's gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Returns the matrices [out, in] in a whole parameter, as views; None for one that AdamW trains.
Cut = Callable[[str, Tensor], list[Tensor] | None]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def in_float32(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """torch's ``_zeropower_via_newtonschulz`` without the cast to bfloat16."""
    a, b, c = ns_coefficients
    ortho_grad = grad.clone()
    if grad.size(0) > grad.size(1):
        ortho_grad = ortho_grad.T
    ortho_grad.div_(ortho_grad.norm().clamp(min=eps))
    for _ in range(ns_steps):
        gram_matrix = ortho_grad @ ortho_grad.T
        gram_update = torch.addmm(gram_matrix, gram_matrix, gram_matrix, beta=b, alpha=c)
        ortho_grad = torch.addmm(ortho_grad, gram_update, ortho_grad, beta=a)
    return ortho_grad.T if grad.size(0) > grad.size(1) else ortho_grad


@contextmanager
def iterating_in(dtype: torch.dtype) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float32:
            patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float32)
        yield


def of_flat(hidden_size: int, width: int) -> Cut:
    """The matrices of models of ``ms.MoELayer`` with mixers: from the sizes, and nothing that moesys declares."""

    def cut(name: str, tensor: Tensor) -> list[Tensor] | None:
        if name.endswith("masters"):
            found = []
            for expert in tensor:
                gate, up, down = expert.split(hidden_size * width)
                found += [gate.view(width, hidden_size), up.view(width, hidden_size), down.view(hidden_size, width)]
            return found
        return [tensor] if re.search(r"(mixers\.\d+|_proj)\.weight$", name) else None

    return cut


def of_transformers(*, interleaved: bool = False, transposed: bool = False) -> Cut:
    def cut(name: str, tensor: Tensor) -> list[Tensor] | None:
        if name.endswith("_bias"):
            return None
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts = [expert.T if transposed else expert for expert in tensor]
            if name.endswith("down_proj"):
                return experts
            width = len(experts[0]) // 2
            if interleaved:
                return [each for expert in experts for each in (expert[0::2], expert[1::2])]
            return [each for expert in experts for each in (expert[:width], expert[width:])]
        return [tensor] if re.search(r"_proj\.weight$", name) else None

    return cut


class Oracle:
    """torch's Muon of each matrix of ``model``, and its AdamW of all else, on whole copies of the parameters."""

    def __init__(self, model: nn.Module, cut: Cut, adamw: Mapping[str, Any], dtype: torch.dtype, **muon: Any) -> None:
        self.model, self.cut, self.dtype = model, cut, dtype
        self.copies = {name: whole(p).clone() for name, p in model.named_parameters()}
        self.views = {name: cut(name, copy) for name, copy in self.copies.items()}
        self.matrices = {name: [nn.Parameter(v.clone()) for v in vs] for name, vs in self.views.items() if vs}
        self.others = {name: nn.Parameter(copy) for name, copy in self.copies.items() if name not in self.matrices}
        self.muon = torch.optim.Muon([each for of in self.matrices.values() for each in of], **muon)
        self.adamw = torch.optim.AdamW(self.others.values(), **adamw) if self.others else None

    def step(self) -> None:
        """With the gradients that the model has. A collective."""
        for name, parameter in self.model.named_parameters():
            grad = None if parameter.grad is None else whole(parameter.grad)
            if name in self.others:
                self.others[name].grad = grad
                continue
            cut = self.cut(name, grad) if grad is not None else [None] * len(self.matrices[name])
            for matrix, part in zip(self.matrices[name], cut, strict=True):
                matrix.grad = None if part is None else part.clone()
        with iterating_in(self.dtype):
            self.muon.step()
        if self.adamw is not None:
            self.adamw.step()

    def errors(self) -> dict[str, float]:
        """The norm of the difference of each parameter over its own. A collective."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for view, matrix in zip(self.views[name] or (), self.matrices.get(name, ()), strict=True):
                view.copy_(matrix.detach())
            wanted = self.others[name].detach() if name in self.others else self.copies[name]
            if not parameter.requires_grad:
                assert torch.equal(whole(parameter), wanted), name
            found[name] = float((whole(parameter) - wanted).norm() / wanted.norm())
        return found
