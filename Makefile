# The interpreter that builds .venv, e.g. make PYTHON=python3.12 test
PYTHON ?= python3
# Options of `timeloom train` for the demo, e.g. make demo ARGS="--cell lstm"
ARGS ?=
# Case lists of the benchmark, e.g. make bench CASES="regimes --memory"
CASES ?= headline grid lstm-grid
# Pieces of the benchmark on a GPU, e.g. make bench-gpu PIECES="grid --resume"
PIECES ?= headline

# Pieces of the checks on a GPU, e.g. make test-gpu CHECKS="modules graphs"; none: all
CHECKS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RELEASE := build/release

.PHONY: help demo test test-gpu lint kernels docs bench bench-gpu release-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: $(READY) ## train a GRU on a built-in task, torch beside timeloom (under 2 minutes on 2 cores)
	$(BIN)/timeloom train --compare 16 $(ARGS)
	@echo
	@echo "Next, with your own data (docs/app.md says what a folder must hold):"
	@echo "  $(BIN)/timeloom train --data my_folder"
	@echo "  $(BIN)/timeloom --help"

test: $(READY) ## run the tests, a file at a time on every core
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-gpu: $(READY) ## check against float64 on this machine's GPU; what is seen goes to benchmarks/results/test-gpu.md
	$(BIN)/python -m tests.gpu $(CHECKS)

kernels: $(READY) ## write the sources of torch's cells: the CPU kernels that wheels hold compiled, the texts of the CUDA ones
	$(BIN)/python -c "from timeloom.kernels.cpu import texts as cpu; from timeloom.kernels.cuda import texts as cuda; cpu.write(); cuda.write()"

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench: $(READY) ## measure against torch.nn on this CPU; tables, JSON and plots go to benchmarks/results
	$(BIN)/python -m benchmarks $(CASES)

bench-gpu: $(READY) ## measure against cuDNN on this machine's GPU; tables and JSON go to benchmarks/results
	$(BIN)/python -m benchmarks.gpu $(PIECES)

release-check: $(READY) ## build the wheel, install it into a fresh environment without a compiler, run the README's code there
	rm -rf $(RELEASE)
	$(BIN)/python -m build --outdir $(RELEASE) .
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls $(RELEASE)/*.whl)[app]"
	cd $(RELEASE) && env -i HOME=$(CURDIR)/$(RELEASE) PATH=$(CURDIR)/$(RELEASE)/venv/bin \
		venv/bin/python -I $(CURDIR)/tests/installed_wheel.py $(CURDIR)/README.md $$(ls *.tar.gz)
	@echo "$$(ls $(RELEASE)/*.whl) can be released"

clean: ## remove caches and build output, keep .venv
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: timeloom needs Python 3.11 or newer, and '$(PYTHON)' is not; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
