"""The page of a watched training: one file of HTML that needs nothing else, for light and dark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from html import escape

import numpy as np

from moesys.lab.runs.watched_run import NEWEST_STEPS, WatchedRun
from moesys.lab.show.html_page import page, section, table
from moesys.lab.show.step_bins import Axis, Bins, FloatArray
from moesys.lab.show.svg import curves, heat_map, number, timeline

# Columns of a figure over steps.
_MOST_BINS = 160
_MOST_EVENTS = 200


def watch_page(run: WatchedRun) -> str:
    """Returns the page: what is in ``run``, over steps, by layer and by event."""
    bins = Bins.of(run.steps_S, _MOST_BINS)
    parts = [f"<h1>MEASURED: {escape(run.folder.resolve().name)}</h1>", _facts(run)]
    first = sorted(run.numbers, key=lambda name: (name != "loss", name))
    parts += [section(name, curves(bins, {name: run.numbers[name]}, name)) for name in first]
    parts += _loads(run, bins)
    parts.append(section("By layer", _layer_table(run), _LAYER_NOTE))
    parts += _times(run, bins)
    parts.append(
        section("Events", _events(run), "Departures from the plan: from one on, bits are not an undisturbed run's.")
    )
    if run.timeline is not None and run.timeline.spans:
        drawn, num_older = timeline(run.timeline)
        note = f"The newest spans; {num_older} before them are not drawn." if num_older else ""
        parts.append(section("Timeline", drawn, f"Rank and lane beside each row. {note}"))
    return page(run.folder.resolve().name, parts)


def _facts(run: WatchedRun) -> str:
    ended = datetime.fromtimestamp(run.time_s_S[-1], UTC)
    losses = run.numbers.get("loss", np.zeros(0))
    losses = losses[np.isfinite(losses)]
    facts = {
        "steps written": f"{len(run.steps_S)}, from {run.steps_S[0]} to {run.steps_S[-1]}",
        "newest step (UTC)": f"{ended:%Y-%m-%d %H:%M:%S}",
        "ranks": str(run.num_ranks),
        "MoE layers": str(len(run.layers)),
        "newest loss": number(losses[-1]) if len(losses) else "none written",
        "load max/mean, median": number(_quantile(run.load_p50_SL, 0.5)),
        "step, median ms": number(_quantile(run.step_ms_S, 0.5)),
        "events": str(len(run.events)),
    }
    said = (f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items())
    return f"<dl>{''.join(said)}</dl>"


def _loads(run: WatchedRun, bins: Bins) -> list[str]:
    if not run.layers:
        return []
    rows = [f"layer {layer}" for layer in run.layers]
    note = (
        "The busiest rank's tokens over the mean: 1 is balanced. A row is a layer, a cell the median of a step's "
        "micro-batches" + ("." if bins.single else ", a mean over its steps.")
    )
    drawn = heat_map(bins.mean(run.load_p50_SL).T, rows, bins.axis(), (1.0, 1.2), "load max/mean")
    parts = [section("Load by layer over steps", drawn, note)]
    over_layers = {
        "p50, mean over layers": _of_steps(np.nanmean, run.load_p50_SL),
        "p95, worst layer": _of_steps(np.nanmax, run.load_p95_SL),
    }
    parts.append(section("Load over steps", curves(bins, over_layers, "load max/mean")))
    if run.tokens_E:
        experts = max(len(tokens_E) for tokens_E in run.tokens_E.values())
        share_LE = np.full((len(run.tokens_E), experts), np.nan)
        for row, tokens_E in enumerate(run.tokens_E.values()):
            share_LE[row, : len(tokens_E)] = tokens_E / max(tokens_E.mean(), 1e-300)
        rows = [f"layer {layer}" for layer in run.tokens_E]
        axis = Axis("expert", list(range(experts)), [f"expert {expert}" for expert in range(experts)])
        note = f"Tokens over the layer's mean, in the newest {min(NEWEST_STEPS, len(run.steps_S))} steps."
        drawn = heat_map(share_LE, rows, axis, (0.0, 2.0), "tokens of an expert over the mean")
        parts.append(section("Tokens of experts by layer", drawn, note))
    return parts


_LAYER_NOTE = (
    "Load: the busiest rank's tokens over the mean. p50 is the median over steps of the median of a step's "
    "micro-batches, p95 the 95th percentile over steps of theirs. The others are means over steps; milliseconds are "
    "means over ranks too."
)


def _layer_table(run: WatchedRun) -> str:
    columns = {
        "layer": [str(layer) for layer in run.layers],
        "load p50": _by_layer(run.load_p50_SL, np.median),
        "load p95": _by_layer(run.load_p95_SL, lambda values: np.quantile(values, 0.95)),
        "worst load": _by_layer(run.load_max_SL, np.max),
        "experts without tokens": _by_layer(run.experts_without_tokens_SL, np.mean),
        "experts without tokens, most": _by_layer(run.experts_without_tokens_SL, np.max),
        "exposed ms": _by_layer(run.exposed_ms_SL, np.mean),
        "exposed ms, worst rank": _by_layer(run.worst_exposed_ms_SL, np.mean),
        "planning ms": _by_layer(run.plan_ms_SL, np.mean),
        "restored MiB, all ranks": _by_layer(run.restored_mib_SL, np.mean),
    }
    return table(list(columns), zip(*columns.values(), strict=True), "layers")


def _times(run: WatchedRun, bins: Bins) -> list[str]:
    parts = [section("Length of steps", curves(bins, {"step": run.step_ms_S}, "ms"))]
    if run.layers:
        exposed = {
            "mean of ranks": _of_steps(np.nansum, run.exposed_ms_SL),
            "worst rank of each layer": _of_steps(np.nansum, run.worst_exposed_ms_SL),
        }
        note = "A rank blocked by communication, added up over layers."
        parts.append(section("Exposed communication", curves(bins, exposed, "ms a step"), note))
        restored = {"restored": _of_steps(np.nansum, run.restored_mib_SL)}
        note = "Received to have experts, over layers and ranks."
        parts.append(section("Restored experts", curves(bins, restored, "MiB a step"), note))
    return parts


def _events(run: WatchedRun) -> str:
    if not run.events:
        return '<p class="none">none</p>'
    rows = [(str(step), str(e.layer), str(e.micro_batch), e.what) for step, e in reversed(run.events[-_MOST_EVENTS:])]
    left_out = len(run.events) - len(rows)
    note = f'<p class="note">The newest {len(rows)}; {left_out} before them are not shown.</p>' if left_out else ""
    return note + table(["step", "layer", "micro-batch", "what"], rows, "events", left={"what"})


def _by_layer(values_SL: FloatArray, reduce: Callable[[FloatArray], float]) -> list[str]:
    """Reduces over the steps in which a layer ran."""
    ran = (values_S[np.isfinite(values_S)] for values_S in values_SL.T)
    return [number(float(reduce(values)) if len(values) else float("nan")) for values in ran]


def _of_steps(reduce: Callable[..., FloatArray], values_SL: FloatArray) -> FloatArray:
    """Reduces over layers, to nan where none ran."""
    reduced_S = np.full(len(values_SL), np.nan)
    ran_S = np.isfinite(values_SL).any(axis=1)
    reduced_S[ran_S] = reduce(values_SL[ran_S], axis=1)
    return reduced_S


def _quantile(values: FloatArray, q: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, q)) if len(known) else float("nan")
