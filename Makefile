# The torch to install: the pin takes the CPU build where there is one. On a GPU machine: make test TORCH='torch>=2.11'
TORCH ?= torch==2.13.0
PYTHON ?= python3
# Files of tests that run at once: many wait for ranks, so that two fill two cores. mypy has as many processes.
WORKERS ?= 2
# Files in their order, as those of many tests first would leave long ones of a single test for the end.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15 --ignore $(GOLDEN)
GOLDEN := tests/golden/test_golden.py
BIN := .venv/bin
# Prints the lower bounds of the dependencies, and of the extras with which tests run, as versions.
define OLDEST
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for bound in project["dependencies"] + extras["hf"] + extras["slurm"]:
    if not re.match("(torch|triton)>", bound):
        print(bound.partition(",")[0].replace(">=", "=="))
endef
export OLDEST
# Prints where an interpreter has its packages.
PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# Dozens of processes import moesys and its tests: byte code is kept, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all golden hosts oldest newest newest-python lint aot docs

demo: .venv/installed
	$(BIN)/python -m experiments.demo

# First, side by side, what would leave cores idle one after the other.
test: .venv/installed
	$(MAKE) -j lint golden
	$(PYTEST)

# Compiles the loops of planners and simulators, and collects all tests, which makes byte code of them and of what they
# import: ranks and workers would otherwise do both side by side.
golden: hosts
	$(BIN)/pytest --timeout 1200 -k test_golden

# Slow cases too, and with MOESYS_SWEEP more of what is drawn. GPU checks are a run of their own: pytest -m gpu tests/gpu.
test-all: lint hosts golden aot oldest newest-python
	MOESYS_SWEEP=1 $(PYTEST) -m "not gpu"

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy

# No kernel spills, by the installed Triton and by the oldest, for Hopper and Blackwell, and all tiles that are tuned
# compile: half an hour, without a GPU.
aot: .venv/installed .venv/oldest-triton
	$(BIN)/python -m benchmarks kernels --aot --candidates --size qwen3-30b
	$(BIN)/python -m benchmarks kernels --aot --candidates --size qwen3-30b --arch sm_100
	PYTHONPATH=.venv/oldest-triton $(BIN)/python -m benchmarks kernels --aot --candidates --size qwen3-30b
	PYTHONPATH=.venv/oldest-triton $(BIN)/python -m benchmarks kernels --aot --candidates --size qwen3-30b --arch sm_100

# Declarations, commands, planners, tables, figures and runs on two ranks, which most dependencies serve. Old releases
# warn of newer ones that they depend on, and word and align the help, and errors of options, differently.
SUPPORTED = -n $(WORKERS) --dist loadfile --timeout 1200 -o filterwarnings= tests/test_command_line.py \
	tests/test_compiled.py tests/test_config.py tests/test_ways_out.py tests/balance tests/lab/commands \
	tests/lab/runs tests/lab/show tests/moe/test_watch.py tests/tuner \
	--deselect tests/test_command_line.py::test_help_is_whole_in_80_columns_and_its_examples_parse \
	--deselect 'tests/test_ways_out.py::test_a_way_out_leads_out[$$ moesys run small.toml --seeds 0]' \
	--deselect 'tests/test_ways_out.py::test_a_way_out_leads_out[$$ moesys run small.toml --thread 1]'
WARM_UP = -c 'from moesys.balance.run_planner import warm_up; warm_up()'

# The oldest release of each dependency that pyproject.toml allows, with the torch and the Triton of .venv.
oldest: .venv/oldest/installed
	.venv/oldest/bin/python $(WARM_UP)
	.venv/oldest/bin/python -m pytest $(SUPPORTED)

# The newest Python for which all dependencies have wheels, if it is installed and has a torch for the CPU.
NEWEST_PYTHON ?= python3.14
newest-python:
	@if $(NEWEST_PYTHON) -c 'import torch; assert torch.version.cuda is None' 2>/dev/null; \
	then $(MAKE) .venv/newest-python/installed && .venv/newest-python/bin/python $(WARM_UP) \
		&& .venv/newest-python/bin/python -m pytest $(SUPPORTED); \
	else echo "newest-python: not tested, as $(NEWEST_PYTHON) with a torch for the CPU is not installed"; fi

# Other trainers, which tests train with.
hosts: .venv/hosts

# What breaks with the newest releases of other trainers. Only one of them: make newest HOST=trl
newest: hosts
	$(BIN)/python tests/newest_hosts.py $(HOST:%=--host %) -- -n $(WORKERS) --dist loadfile

# Into site/; pages that name what is not there end it.
docs: .venv/docs-installed
	$(BIN)/mkdocs build --strict

# torch first: the range in pyproject.toml would choose a CUDA build of several gigabytes. Python makes byte code of what
# it imports; pip would make it of six million lines.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile '$(TORCH)'
	$(BIN)/pip install --no-compile -e '.[test]'
	touch $@

# The oldest Triton that moesys runs on, torch 2.11's: it stands aside, and is only asked to compile.
.venv/oldest-triton: .venv/installed
	rm -rf $@ $@.part
	$(BIN)/pip install --no-deps --target $@.part 'triton==3.6.0'
	mv $@.part $@
	touch $@

# What it has stands before what .venv has.
.venv/oldest/installed: .venv/installed
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PACKAGES))')" > "$$($(@D)/bin/python $(PACKAGES))/newest.pth"
	$(BIN)/python -c "$$OLDEST" > $(@D)/requirements.txt
	$(@D)/bin/pip install --no-compile -r $(@D)/requirements.txt
	touch $@

.venv/newest-python/installed: pyproject.toml
	rm -rf $(@D)
	$(NEWEST_PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(NEWEST_PYTHON) $(PACKAGES))')" > "$$($(@D)/bin/python $(PACKAGES))/torch.pth"
	$(@D)/bin/pip install --no-compile -e '.[test]'
	touch $@

# They stand aside too, without what they depend on: some want older packages than the environment has, and Megatron-Core
# a newer Python than its code needs.
.venv/hosts: .venv/installed tests/torchtitan/requirements.txt
	rm -rf $@ $@.part
	$(BIN)/pip install --no-deps --ignore-requires-python --no-compile --target $@.part -r tests/torchtitan/requirements.txt
	rm -rf $@.part/tests $@.part/scripts # of verl's wheel: they would hide our own
	mv $@.part $@
	touch $@

.venv/docs-installed: .venv/installed
	$(BIN)/pip install -e '.[docs]'
	touch $@
