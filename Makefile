# Everything starts here; `make help` lists it. The virtual environment in .venv is made on first use and shared by all.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Search a dozen candidates of several families on two CPU devices (under two minutes)
	@$(BIN)/hydra-tune search examples/digits.yaml

test: $(STAMP) ## Run the tests (about fourteen minutes on two cores)
	@$(BIN)/python -m pytest -q -m "not slow" -n 4 --dist loadfile --durations=20

slow: $(STAMP) ## Run the tests that `make test` leaves to CI: clusters, whole searches on the test accelerator, crash points
	@$(BIN)/python -m pytest -q -m slow -n 2 --dist loadfile --durations=20

quick: $(STAMP) ## Run the smoke tests (under 45 seconds)
	@$(BIN)/python -m pytest -q -m smoke -n 2 --dist loadfile

MODELS ?= all
zoo: $(STAMP) ## Train every model of the zoo in shards, and write docs/models.md (about three minutes)
	@HYDRA_TUNE_ZOO="$(MODELS)" $(BIN)/python -m pytest -q tests/zoo

check: lint test slow ## Lint, type-check and test, as CI does

lint: $(STAMP) ## Lint and type-check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@rm -rf build/typecheck build/lib build/bdist*
	@$(BIN)/pip install -q --no-deps --no-build-isolation --disable-pip-version-check --target build/typecheck .
	@cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy_cache -p hydra_tune

bench: $(STAMP) ## Run every benchmark in its quick form (installs the peers)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[bench]
	@for file in benchmarks/[a-z]*.py; do name=$$(basename $$file .py); echo "== $$name"; \
		$(BIN)/python -m benchmarks.$$name --quick || exit 1; done

clean: ## Remove what was made, but not databases
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and pinned: the plain name would fetch gigabytes of CUDA packages on a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel "torch==2.13.0"
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e .[dev]
	@touch $@

.PHONY: help demo test slow quick zoo check lint bench clean
