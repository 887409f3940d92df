"""The house has floors: imports go down only. One table has them all."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import moesys
from moesys import config

ROOT = Path(__file__).parents[1]


def floors(text: str) -> tuple[set[str], ...]:
    """Returns the names on each floor, from the ground."""
    return tuple(set(names.split()) for names in text.split("|"))


FLOORS = floors(
    "config load layout timeline display compiled kinds torch_private files journal step_lines collectives frames"
    "| kernels | traces cost schedule limits | row_traffic | balance | overlap | moe simulator"
    "| hf megatron torchtitan | tuner | lab verify | models planning | __main__"
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}

# Floors inside a room, of folders and of files by their names; "*" are the files that are not named.
FLOORS_IN = {
    "config": floors(
        "base | model cluster sharding member overlap | strategy | model_spec | workload | experiment model_run"
        "| presets | __init__"
    ),
    "kernels": floors("torch_internals launch first_derivatives | cpu routing | experts | split symmetric | mega"),
    "balance": floors(
        "planning_problem | flow | static even_split quotas certificate late_slots | * | greedy | cp_sat | run_planner"
        "| plan | layout_schedule replay"
    ),
    "overlap": floors("comm | *"),
    "simulator": floors("* | model"),
    "verify": floors("setup | recording diagnosis | comparison | runs | *"),
    "lab": floors("ranks | train | runs | show | calibrate | commands"),
}

# Units of moesys that a unit may not import although they are not above it.
CLOSED = {
    "kernels": set(FLOOR_OF) - {"kernels"},
    "config": set(FLOOR_OF) - {"config", "display", "kinds"},
    "simulator": {"kernels", "overlap", "moe"},
    "moe": {"simulator"},
    # It needs torch alone, so that it runs where nothing else is installed.
    "verify": set(FLOOR_OF) - {"verify", "lab", "kinds", "display", "torch_private"},
}
# Units and packages that a unit imports inside functions only, so that a planner is declared without them.
LAZY = {"balance": {"kernels", "torch", "ortools", "numba"}, "kernels": {"cupy"}}
# Who alone may import a package, and packages that a unit may not import at all.
ONLY_IN = {"ortools": {"balance"}, "cupy": {"kernels"}, "rich": {"lab"}, "experiments": set(), "benchmarks": set()}
REFUSED = {
    **{key: {"torch"} for key in ("config", "load", "layout", "timeline", "schedule", "journal", "step_lines")},
    "simulator": {"torch", "triton"},
    "balance": {"triton"},
    "kernels": {"pydantic", "ortools", "rich"},
    "verify": {"numba", "numpy", "ortools", "pydantic", "rich", "scipy", "triton", "typer"},
}
MAY_PRINT = {"lab", "verify", "__main__"}

# Files that may use what is not public in torch, and names of its methods and attributes that are not.
PRIVATE_OF_TORCH = {"torch_private.py", "kernels/torch_internals.py"}
TORCH_NAMES = {"torch", "dist", "Variable", "functional", "nn"}
PRIVATE_METHODS = {"_execution_engine", "_get_backend", "_get_default_store", "_symmetric_memory"}

CONTAINERS = {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict", "WeakKeyDictionary"}
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}


def is_submodule(name: str) -> bool:
    path = ROOT / "moesys" / name
    return name != "" and (name in FLOOR_OF or path.is_dir() or path.with_suffix(".py").is_file())


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def source_of(node: ast.ImportFrom, package: str) -> str:
    """The dotted name from which a module of ``package`` takes others."""
    parents = package.split(".")[: 1 - node.level or None] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def imports(tree: ast.Module, package: str) -> list[tuple[str, bool]]:
    """Dotted names imported anywhere in a module of ``package``, and whether at its top level."""
    top_level = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = source_of(node, package)
            names = [f"{source}.{alias.name}" for alias in node.names] if source == "moesys" else [source]
        found += [(name, id(node) in top_level) for name in names]
    return found


def shared_state(tree: ast.Module) -> list[str]:
    """Names of a module's top-level containers that code in it changes, and ``global`` statements."""
    containers = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            made_by = node.value.func if isinstance(node.value, ast.Call) else None
            made = getattr(made_by, "attr", getattr(made_by, "id", None))
            literal = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            if isinstance(node.value, literal) or made in CONTAINERS:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                found.append(f"global {', '.join(names)}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in MUTATORS:
                found += [f"{name}.{attr}()"] if name in containers else []
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()) if name in containers:
                found.append(f"{name}[...] changes")
    return found


def floor_in(room: str, place: str) -> int:
    """The floor of a folder or file of a room with floors inside; what no floor names is on that of "*", or on top."""
    floors = FLOORS_IN[room]
    named = (floor for wanted in (place, "*") for floor, places in enumerate(floors) if wanted in places)
    return next(named, len(floors))


def violations(path: str, source: str) -> list[str]:
    """What a file of moesys does against the table; ``path`` relative to moesys/, as in ``balance/greedy.py``."""
    tree = tree_of(source)
    parts = path.removesuffix(".py").split("/")
    unit = parts[0]
    found = []
    for name, top_level in imports(tree, ".".join(["moesys", *parts[:-1]])):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package == "moesys":
            if not is_submodule(target):
                found.append(f"{unit} imports the public names; import the module that defines them")
            elif target not in FLOOR_OF:
                found.append(f"{target} has no floor")
            elif FLOOR_OF[target] > FLOOR_OF[unit] or target in CLOSED.get(unit, ()):
                found.append(f"{unit} imports {target}")
            elif target in LAZY.get(unit, ()) and top_level:
                found.append(f"{unit} imports {target} outside a function")
            elif target == unit and unit in FLOORS_IN:
                place = (*rest.split("."), "__init__")[1]
                if floor_in(unit, place) > floor_in(unit, parts[1]):
                    found.append(f"{unit}/{parts[1]} imports {unit}/{place}")
        elif unit not in ONLY_IN.get(package, {unit}) or package in REFUSED.get(unit, ()):
            found.append(f"{unit} imports {package}")
        elif package in LAZY.get(unit, ()) and top_level:
            found.append(f"{unit} imports {package} outside a function")
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if unit not in MAY_PRINT and any(isinstance(call, ast.Name) and call.id == "print" for call in calls):
        found.append(f"{unit} prints")
    return found + shared_state(tree)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each file of moesys the files it imports anywhere in it, where only type checkers look too. Paths relative to
    moesys/.
    """
    file_of = {
        "moesys." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources
    }
    graph = {}
    for path, source in sources.items():
        package = ".".join(["moesys", *path.split("/")[:-1]])
        names = set()
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = source_of(node, package)
                wanted = (f"{module}.{alias.name}" for alias in node.names)
                names |= {name if name in file_of else module for name in wanted}
        graph[path] = {file_of[name] for name in names if name in file_of} - {path}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other, the first again at the end; [] if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def private_of_torch(source: str) -> list[str]:
    """What a file uses of torch that is not public, as it is written there."""
    found = []
    for node in ast.walk(tree_of(source)):
        match node:
            case ast.Attribute(attr=attr) if attr.startswith("_") and not attr.startswith("__"):
                written = ast.unparse(node)
                if written.split(".")[0] in TORCH_NAMES or attr in PRIVATE_METHODS:
                    found.append(written)
            case ast.Import() | ast.ImportFrom():
                names = [alias.name for alias in node.names]
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                dotted = [f"{module}.{name}".strip(".") for name in names]
                found += [name for name in dotted if name.startswith("torch.") and "._" in name]
    return found


FILES = sorted(path.relative_to(ROOT / "moesys").as_posix() for path in (ROOT / "moesys").rglob("*.py"))


SOURCES = {path: (ROOT / "moesys" / path).read_text() for path in FILES}
# All but the file of the public names.
BELOW = {path: source for path, source in SOURCES.items() if path != "__init__.py"}


def test_files_keep_to_their_floors():
    assert [path for path in BELOW if path.removesuffix(".py").split("/")[0] not in FLOOR_OF] == [], "give it a floor"
    assert {path: found for path, source in BELOW.items() if (found := violations(path, source))} == {}


@pytest.mark.parametrize(
    ("path", "source", "violation"),
    [
        ("config/base.py", "import moesys.moe.layer", "config imports moe"),
        ("config/base.py", "import torch", "config imports torch"),
        ("layout.py", "def f():\n    from torch import Tensor", "layout imports torch"),
        ("overlap/a.py", "from moesys import moe", "overlap imports moe"),
        ("simulator/a.py", "from ..moe import layer", "simulator imports moe"),
        ("moe/a.py", "from .. import simulator", "moe imports simulator"),
        ("balance/a.py", "def f():\n    from moesys.overlap.b import c", "balance imports overlap"),
        ("balance/a.py", "from moesys.kernels import routing", "balance imports kernels outside a function"),
        ("balance/a.py", "import numba", "balance imports numba outside a function"),
        ("config/presets.py", "import moesys.layout", "config imports layout"),
        ("config/base.py", "from moesys.config.model import ModelShape", "config/base imports config/model"),
        ("balance/flow/a.py", "import moesys.balance.greedy.b", "balance/flow imports balance/greedy"),
        ("lab/runs/a.py", "from moesys.lab.show import b", "lab/runs imports lab/show"),
        ("moe/a.py", "import cupy", "moe imports cupy"),
        ("lab/a.py", "import experiments.tiny", "lab imports experiments"),
        ("moe/a.py", "import moesys as ms", "moe imports the public names; import the module that defines them"),
        ("tuner/a.py", "print(1)", "tuner prints"),
        ("moe/a.py", "seen = {}\ndef f():\n    seen[1] = 2", "seen[...] changes"),
        ("moe/a.py", "from collections import deque\nq = deque()\ndef f():\n    q.append(1)", "q.append()"),
        ("moe/a.py", "n = 0\ndef f():\n    global n\n    n = 1", "global n"),
    ],
)
def test_the_table_sees(path, source, violation):
    assert violations(path, source) == [violation]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "from .b import c\ndef f():\n    import cupy"),
        ("layout.py", "from moesys.load import LoadMatrix"),
        ("overlap/a.py", "from moesys.balance.plan import plan_layer\nfrom moesys.overlap import chunked"),
        ("lab/a.py", "import rich\nprint(1)"),
        ("moe/a.py", "TABLE = {1: 2}\ndef f():\n    seen = []\n    seen.append(TABLE[1])"),
    ],
)
def test_the_table_allows(path, source):
    assert violations(path, source) == []


def test_the_tables_name_what_is_there():
    inside = {f"{room}/{place}" for room, floors in FLOORS_IN.items() for place in set().union(*floors) - {"*"}}
    paths = [ROOT / "moesys" / name for name in sorted({*FLOOR_OF, *inside})]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


def test_no_files_import_each_other_in_a_circle():
    assert circle(import_graph(BELOW)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from moesys.moe.a import f",
        "from moesys.moe import a",
        "from . import a",
        "def f():\n    import moesys.moe.a",
        "if TYPE_CHECKING:\n    from .a import f",
    ],
)
def test_a_circle_is_seen(back):
    ahead = {"moe/a.py": "from moesys.moe.b import f", "moe/b.py": "from moesys.moe.c import f", "moe/d.py": ""}
    assert circle(import_graph({**ahead, "moe/c.py": "import moesys.moe.d"})) == []
    assert set(circle(import_graph({**ahead, "moe/c.py": back}))) == {"moe/a.py", "moe/b.py", "moe/c.py"}


def test_what_is_not_public_in_torch_is_used_in_the_files_for_it():
    assert {path for path, source in SOURCES.items() if private_of_torch(source)} == PRIVATE_OF_TORCH


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch._C._will_engine_execute_node(node)", ["torch._C._will_engine_execute_node", "torch._C"]),
        ("group._get_backend(device)", ["group._get_backend"]),
        ("import torch.distributed._symmetric_memory as memory", ["torch.distributed._symmetric_memory"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("self._group, torch.__version__", []),
    ],
)
def test_what_is_not_public_in_torch_is_seen(source, found):
    assert private_of_torch(source) == found


def test_every_public_name_resolves_everything_that_is_declared_is_public_and_there_are_few() -> None:
    """Specialists' names are in modules; the limit has room for one more optimizer."""
    for package in (moesys, moesys.models, moesys.planning, moesys.traces):
        assert package.__all__ == sorted(package.__all__)
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
        assert set(package.__all__) <= set(dir(package))
    assert len(set(moesys.__all__) - set(moesys._MODULES)) <= 65
    declared = {
        name for name, value in vars(config).items() if isinstance(value, type) and value.__module__ == config.__name__
    }
    assert declared <= {*moesys.__all__, *moesys.models.__all__}


# Prints, after each step, how many modules of moesys are loaded, and which that must not be.
LOADED = """
import os, sys
def report(*refused):
    number = sum(name.startswith("moesys.") for name in sys.modules)
    print(number, *(name for name in sys.modules if name.startswith(refused)), flush=True)
if not os.fork():
    import moesys as ms
    ms.Strategy, ms.presets.laer(2), ms.models.Gqa, ms.planning.TokenPlan
    report("torch")
    os._exit(0)
os.wait()
import torch
import moesys.moe.layer
report(*{refused})
import moesys as ms
shape = ms.ModelShape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
layer = ms.MoELayer(shape, ms.Strategy(name="ep"))
layer(torch.randn(4, 8)).sum().backward()
report(*{refused})
fsep = ms.Strategy(
    name="fsep", sharding=ms.Fsep(slots_per_rank=8), balance=ms.Greedy(), split=ms.FlowSplit(),
    overlap=ms.Pipelined(chunks=4),
)
layer = ms.MoELayer(shape, fsep)
optimizer = torch.optim.AdamW(layer.parameters())
with ms.Watch(layer, sys.argv[1]) as watch:
    for _ in range(3):
        layer(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        watch.step()
report("numba", "scipy", "ortools", "pandas", "transformers", "rich")
import moesys.hf
report("transformers")
import moesys.lab.show.figures
report("matplotlib.pyplot")
"""
REFUSED_BY_THE_LAYER = (
    *("ortools", "numba", "scipy", "moesys.simulator", "moesys.balance.cp_sat", "moesys.balance.flow"),
    *("moesys.balance.greedy", "moesys.balance.eplb", "moesys.balance.laer", "moesys.balance.quotas"),
)
# Modules of moesys.
LOADED_BY_THE_LAYER = 80


@pytest.mark.ranks
def test_what_is_imported_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """A strategy is declared without torch. The layer loads no simulator, solver or compiler, imported or run, and on
    one rank no planner does; the hosts load no transformers.
    """
    program = LOADED.format(refused=REFUSED_BY_THE_LAYER)
    command = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split() for line in done.stdout.splitlines()]
    assert [refused for _, *refused in found] == [[]] * 6
    assert max(int(number) for number, *_ in found[1:3]) <= LOADED_BY_THE_LAYER
