"""What all tests share: local ranks started once, outputs born as NaN, one thread, and how long hypothesis searches."""

import atexit
import functools
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from moesys.kernels.cpu.page_pool import PagePool
from moesys.lab.ranks import pool, process
from moesys.lab.ranks.pool import LocalRanks

# before any kernel is imported: there is no GPU here
os.environ["TRITON_INTERPRET"] = "1"
# runs the tests that are marked gpu, and only those
pytest_plugins = ["gpu_plugin"]

# what tests share says on failure what it compared, as tests do
pytest.register_assert_rewrite("hf_cases")


SWEEP = os.environ.get("MOESYS_SWEEP") == "1"
# Tests that use ranks have a fixture that gives them; these files start ranks, workers or other programs themselves.
PROCESSES = (
    *("balance/test_agreement", "benchmarks/shaped/", "benchmarks/test_bench_hosts", "benchmarks/test_bench_models"),
    *(
        "experiments/test_demo",
        "experiments/test_experiments",
        "golden/test_golden",
        "gpu/test_gpu_plugin",
        "gpu/test_planted_faults_of_ranks",
    ),
    *("faults/", "kernels/test_aot"),
    *("lab/calibrate/test_calibrate", "lab/ranks/", "lab/runs/test_bisect"),
    *("lab/runs/test_ends", "lab/runs/test_runner"),
    *("lab/runs/test_slurm", "lab/runs/test_tuning", "lab/runs/test_watched_run", "lab/runs/test_workers"),
    *(
        "test_files_of_ranks",
        "test_notebook",
        "test_read_only",
        "test_wheel",
        "tuner/test_worker_processes",
        "verify/test_",
    ),
)
# Folders and files whose tests run kernels in Triton's interpreter, or compile them.
INTERPRETER = (
    *("balance/test_device_split", "benchmarks/test_bench_kernels", "benchmarks/test_bench_mega", "gpu/"),
    *("kernels/experts/", "kernels/mega/", "kernels/routing/", "kernels/symmetric/"),
    *("kernels/test_", "lab/calibrate/test_calibrate_timings", "moe/test_kept_casts"),
    *("moe/test_layout_invariant", "moe/test_local"),
    *("moe/test_mega_layer", "moe/test_triton_experts", "overlap/test_device_routes", "overlap/test_mega"),
    *("overlap/test_row_limit", "overlap/test_task_times"),
    "weak_memory/",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the markers ``ranks`` and ``interpreter``: what has neither, and is not slow, runs on every save. And
    ``slow``, to what slow.txt names.
    """
    long = {line for line in (Path(__file__).parent / "slow.txt").read_text().splitlines() if "::" in line}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in long or name.partition("[")[0] in long:
            item.add_marker(pytest.mark.slow)
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(PROCESSES) or any(map(_gives_ranks, _fixtures_of(item))):
            item.add_marker(pytest.mark.ranks)
        if path.startswith(INTERPRETER):
            item.add_marker(pytest.mark.interpreter)


def pytest_collection_finish() -> None:
    """Spares collections of garbage a walk through all modules and tests, until the end, which would report leaks."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _fixtures_of(item: pytest.Item) -> list[Any]:
    info = getattr(item, "_fixtureinfo", None)
    return [] if info is None else [defined[-1] for defined in info.name2fixturedefs.values()]


def _gives_ranks(fixture: Any) -> bool:
    return "LocalRanks" in str(fixture.func.__annotations__.get("return", ""))


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # a terminal's width would cut tables, and workers of pytest-xdist inherit one
    os.environ.pop("COLUMNS", None)
    shared: dict[str, Any] = {
        "deadline": None,
        "derandomize": bool(os.environ.get("CI")),
        # how long examples take says how busy the machine is
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings.register_profile("quick", max_examples=6, **shared)
    settings.register_profile("sweep", max_examples=400, **shared)
    settings.load_profile("sweep" if SWEEP else "quick")


def examples(usual: int, sweep: int) -> settings:
    """Returns the settings of a test whose examples take long: how many it has, and how many with MOESYS_SWEEP=1."""
    return settings(max_examples=sweep if SWEEP else usual)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of the fault injector after a sweep."""
    # Not at the top: ranks import this file without the folders of pytest.
    import faults

    if SWEEP and (trials := faults.tried(faults.journal())):
        terminalreporter.section("faults, with this code")
        for line in faults.table(trials):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def ranks() -> Iterator[LocalRanks]:
    """Four local ranks for all tests. They start with the first run, so tests without them do not pay."""
    with PreparedRanks(4) as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def _shared_probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of one run of tests share what probes of matrix products find, and no run takes that of another."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESYS_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _preloaded_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever starts the first ranks of this process, those of all later pools find loaded what any of them needs:
    seconds of every rank, and again of all after each run that fails.
    """
    if all(item.get_closest_marker("gpu") for item in request.session.items):
        # GPU checks preload modules of their own: ranks could not use a GPU that has been touched before they start.
        yield
        return
    needed = (
        "hypothesis",
        "pytest",
        "triton",
        "moesys.lab.runs.trials",
        "moesys.lab.train.loop",
        "moesys.overlap.mega_executor",
        "transformers.models.auto.modeling_auto",
        "transformers.trainer",
        "rank_preload",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_PRELOAD", (*process._PRELOAD, *needed))
        # How long work takes says how busy the machine is, too. Tests of workers start them at once.
        patch.setattr(pool, "ALONE_S", 3600.0)
        # where the server of ranks finds what is beside this file
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def assert_equal(found: Any, wanted: Any, where: object = "") -> None:
    """Two tensors, or dicts and sequences of them, are equal to the last bit. ``where``: what they are of."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda difference: f"{where} {difference}")


def refusal(fn: Callable[..., object], *arguments: Any) -> str:
    """Returns what a rank is told where all are refused: ranks that raised would end, and others start, in seconds."""
    try:
        fn(*arguments)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def on_ranks(num_ranks: int, timeout_s: float = 60.0) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Has the body of a test, which may take parameters and folders, run on so many ranks."""

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: LocalRanks, **given: Any) -> None:
            ranks.run(_run_body, test, given, num_ranks=num_ranks, timeout_s=timeout_s)

        parameters = inspect.signature(body).parameters.values()
        ranks = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([ranks, *parameters])  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(test: Any, given: dict[str, Any]) -> None:
    test.__wrapped__(**given)


class PreparedRanks(LocalRanks):
    """Ranks on which outputs are born as NaN, and whose interpreter is quick."""

    def outcomes(self, fn: Callable[..., Any], *args: Any, **limits: Any) -> list[process.Outcome]:
        return super().outcomes(_prepared, fn, *args, **limits)


def _prepared(fn: Callable[..., Any], *args: Any) -> Any:
    _prepare_rank()
    return fn(*args)


@functools.cache
def _prepare_rank() -> None:
    fill_new_memory()
    quicken_interpreter()


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    quicken_interpreter()


def quicken_interpreter() -> None:
    """Triton's interpreter puts its own functions into `triton.language` anew for every call of a device function, and
    looks for overflows that it then says nothing of: half of its time. Here it does the one once a launch, and the
    other never.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    patch_language = interpreter._patch_lang
    if getattr(patch_language, "_once_a_launch", False):
        return
    # All modules through which device functions see the language; of a function only its globals are looked at.
    everywhere = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def once_a_launch(_: object) -> object:
        return patch_language(everywhere)

    once_a_launch._once_a_launch = True
    interpreter._patch_lang = once_a_launch
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


@pytest.fixture(scope="session", autouse=True)
def _filled_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fill_new_memory(patch.setattr)
        yield


def fill_new_memory(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Makes memory that `moesys` takes unwritten recognisable: NaN, the largest integer, or True.

    Covers `torch.empty`, `torch.empty_like` and `Tensor.new_empty` where code of the package calls them, and
    `PagePool`, whose pages hold what was there before.
    """
    # A device as a context goes by the constructors that are there when it is first used: by those that it can catch.
    with torch.device("cpu"):
        torch.empty(0)
    set_attribute(torch, "empty", _filling(torch.empty))
    set_attribute(torch, "empty_like", _filling(torch.empty_like))
    set_attribute(torch.Tensor, "new_empty", _filling(_new_empty))
    set_attribute(PagePool, "empty", _filling(PagePool.empty))


def _filling(new: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = new(*args, **kwargs)
        # First, as a compiled caller has no frame to ask for.
        if torch.compiler.is_compiling():
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "moesys":
            with torch.no_grad():
                tensor.fill_(_unlikely(tensor.dtype))
        return tensor

    return filled


def _new_empty(tensor: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
    # Not the method itself, which torch.compile recognises only in its own place.
    together = len(size) == 1 and isinstance(size[0], Sequence)
    return torch.ops.aten.new_empty(tensor, size[0] if together else size, **options)


def _unlikely(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
