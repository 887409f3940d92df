"""Routes as inference engines return them, aligned with the tokens of a batch."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import drawn, text
from numpy.typing import NDArray
from torch import Tensor

import moesys as ms

Array = NDArray[np.integer]
E, L, K = 8, 2, 3
# The first token and the number of tokens of each of four sequences; the rest of 20 is padding.
SPANS = ((3, 12), (0, 20), (8, 9), (0, 5))
MASK = torch.zeros(4, 20, dtype=torch.int64)
for row, (begin, size) in enumerate(SPANS):
    MASK[row, begin : begin + size] = 1


def ids_of(num_tokens: int, seed: int = 0, layers: int = L) -> Array:
    """Any experts, [tokens, layers, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, layers, E, generator=generator).argsort(dim=2)[:, :, :K].numpy()


def in_base64(rows: Array) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def in_a_file(rows: Array) -> bytes:
    np.save(file := io.BytesIO(), rows.astype(np.uint8))
    return base64.b64encode(file.getvalue())


def in_pieces(rows: Array) -> list[tuple[int, Any]]:
    """A rollout that was stopped twice: the second piece begins where the first ends, the third repeats two rows."""
    first, second = len(rows) // 3, len(rows) // 2
    third = torch.from_numpy(rows[second - 2 :])
    return [(0, rows[:first]), (first, in_base64(rows[first:second])), (second - 2, third)]


FORMS: dict[str, Any] = {
    "int32": lambda rows: rows.astype(np.int32),
    "read-only": lambda rows: np.frombuffer(rows.tobytes(), rows.dtype).reshape(rows.shape),
    "tensor": lambda rows: torch.from_numpy(rows).to(torch.uint8),
    "lists": lambda rows: rows.tolist(),
    "base64": in_base64,
    "file": in_a_file,
    "pieces": in_pieces,
    "a row each": lambda rows: np.concatenate([rows, np.full((1, L, K), -1)]),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return drawn("qwen3_moe", experts_implementation=ms.hf.register()).eval()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_ids(model: Any, form: str) -> None:
    rows = [ids_of(size - 1, seed) for seed, (_, size) in enumerate(SPANS)]
    wanted = np.full((4, 20, L, K), -1)
    for row, (begin, size) in enumerate(SPANS):
        wanted[row, begin : begin + size - 1] = rows[row]
        wanted[row, begin + size - 1] = -2
    given = [FORMS[form](each) for each in rows]
    padded = ms.hf.align_routing(model, given, MASK)
    assert padded.dtype == torch.int16
    assert np.array_equal(padded.permute(1, 0, 2), wanted.reshape(80, L, K))
    packed = ms.hf.align_routing(model, given, [size for _, size in SPANS])
    assert np.array_equal(packed.permute(1, 0, 2), wanted[MASK.bool().numpy()])


def test_later_pieces_replace_earlier_ones_but_for_rows_without_a_route(model: Any) -> None:
    first, second = ids_of(6, 1), ids_of(5, 2)
    second[1] = -1
    found = ms.hf.align_routing(model, [[(0, first), (3, second)], None, []], [9, 2, 1]).permute(1, 0, 2).numpy()
    assert np.array_equal(found[:3], first[:3])
    assert np.array_equal(found[3], second[0])
    assert np.array_equal(found[4], first[4])
    assert np.array_equal(found[5:8], second[2:])
    assert (found[8:] == -2).all()


@pytest.mark.parametrize("form", ["int32", "base64", "file"])
def test_layers_without_experts_are_left_out(form: str) -> None:
    model = drawn("deepseek_v3", experts_implementation=ms.hf.register())
    rows = ids_of(8)
    rows[:, 0] = 0
    found = ms.hf.align_routing(model, [FORMS[form](rows)], [9])
    assert np.array_equal(found[0, :8], rows[:, 1])
    if form != "base64":
        assert torch.equal(ms.hf.align_routing(model, [FORMS[form](rows[:, 1:])], [9]), found)


def test_tokens_without_a_route_are_routed_live(model: Any) -> None:
    """The routes of prompts and of the last tokens are missing, as is a prefix that was in a cache."""
    ids = text(0, num_rows=4)
    cached = ids_of(19, 1)
    cached[:7] = -1
    routes = [[(6, ids_of(5))], cached, None, ids_of(4, 3)]
    with torch.no_grad(), ms.record_routing(model) as live:
        plain = model(input_ids=ids, attention_mask=MASK).logits
    given = ms.hf.align_routing(model, routes, MASK)
    with torch.no_grad(), ms.replay_routing(model, given), ms.record_routing(model) as found:
        changed = model(input_ids=ids, attention_mask=MASK).logits
    first = live[0][0].long(), found[0][0].long()
    has_route = given[0, :, 0] >= 0
    assert torch.equal(first[1][has_route], given[0][has_route].long())
    # In the first layer, whose inputs are equal.
    assert torch.equal(first[1][~has_route], first[0][~has_route])
    assert torch.equal((found[0] < 0).all(dim=2), (given == -1).all(dim=2))
    assert torch.equal(changed[2][MASK[2].bool()], plain[2][MASK[2].bool()])
    assert not torch.equal(changed[1], plain[1])


def test_missing_routes_change_no_bit(model: Any) -> None:
    """Neither forward nor gradients, where the others are those of the live router."""
    ids = text(0, num_rows=4)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, attention_mask=MASK, labels=ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    with ms.record_routing(model) as recorded:
        wanted = gradients()
    rows = recorded[0].permute(1, 0, 2).unflatten(0, (4, 20))
    routes = [rows[row, begin : begin + size - 1] for row, (begin, size) in enumerate(SPANS)]
    with ms.replay_routing(model, ms.hf.align_routing(model, routes, MASK)):
        found = gradients()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def changed(form: str, place: tuple[int, int, int], value: int) -> Any:
    rows = ids_of(11)
    rows[place] = value
    return FORMS[form](rows)


FAULTS: list[tuple[Any, str]] = [
    (changed("int32", (7, 1, 2), E), "routes[1], row 7, layer 1, has 8; model.layers.1.mlp.gate has experts 0 to 7"),
    (changed("base64", (10, 0, 0), -2), "routes[1], row 10, layer 0, has -2; model.layers.0.mlp.gate has experts"),
    (changed("file", (0, 0, 1), 255), "routes[1], row 0, layer 0, has 255; model.layers.0.mlp.gate has experts"),
    (changed("pieces", (6, 1, 0), -1), "routes[1][2], row 3, layer 1, has -1; model.layers.1.mlp.gate has experts"),
    (np.zeros((11, L, K), int), "routes[1], row 0, layer 0, has expert 0 twice, in [0, 0, 0]; a token of"),
    (ids_of(10), "routes[1] has rows for the tokens 0 to 9, and the sequence has 12; give a row of each token but"),
    (ids_of(13), "routes[1] has rows for the tokens 0 to 12, and the sequence has 12;"),
    ([(0, ids_of(4)), (9, ids_of(4))], "routes[1][1] has rows for the tokens 9 to 12, and the sequence has 12;"),
    ([(-1, ids_of(4))], "routes[1][0] has rows for the tokens -1 to 2, and the sequence has 12;"),
    (ids_of(11, layers=3), "routes[1] holds no routes: they have shape (11, 3, 3); give [tokens, layers, K] with K=3"),
    (ids_of(11)[:, :, :2], "routes[1] holds no routes: they have shape (11, 2, 2); give [tokens, layers, K] with K=3"),
    (ids_of(11).reshape(11, -1), "routes[1] holds no routes: routed_experts has shape (11, 6), and [tokens, layers"),
    (ids_of(11) * 1.0, "routes[1] holds no routes: expert ids are float64; give whole numbers"),
    (in_base64(ids_of(11))[:-16], "routes[1] holds no routes: cannot reshape array"),
    ("{}", "routes[1] holds no routes: "),
    ([[[0, 1, 2]], [[0, 1]]], "routes[1] holds no routes: "),
]


@pytest.mark.parametrize(("routes", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_wrong_row_is_refused_by_name(model: Any, routes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ms.hf.align_routing(model, [None, routes], [3, 12])


def test_every_sequence_needs_an_entry(model: Any) -> None:
    with pytest.raises(ValueError, match="routes has 1 entries for 4 sequences; give None for one without"):
        ms.hf.align_routing(model, [None], MASK)
