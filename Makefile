# Three commands matter: `make demo`, `make test` and `make test-all`; on a GPU, `make test-gpu`; for the documentation, `make docs`.
# They need only python3 (3.11 or later, with venv) and pip.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
DOCS_STAMP := .venv/docs-installed
DEMO := runs/demo

# The tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: test test-all test-gpu check demo docs venv

# What every change has to pass.
test: venv
	@$(MAKE) --no-print-directory check

# Besides, what takes longer: tests/thorough.py says which tests these are, and why. SHARD=2/4 runs the second quarter.
SHARD ?= 1/1
test-all: test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m thorough --shard $(SHARD)

# Parity, copies and memory on this host's accelerator; says so and ends well where there is none. It installs nothing:
# without .venv python3 has to have torch and pytest. ARGS="-k one_process" runs a part.
test-gpu:
	PYTHONPATH=src:. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -W default -rs --durations=0 \
	  --durations-min=1 --device auto tests/accelerator/test_engines.py $(ARGS)

# The quick ones first.
check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not thorough"

# The main job: three ways to train one model, from the same start, under the same budget, in real processes.
demo: venv
	rm -rf $(DEMO)
	$(BIN)/paceline compare digits --engine local --seconds 20 --evaluate-every 0.5 \
	  --delay "fraction=0.5 normal:mean=0,std=0.1" \
	  --strategy "replicas=8" \
	  --strategy "replicas=8 aggregation=asynchronous" \
	  --strategy "replicas=8 aggregation=smooth-switch:every=500" \
	  --baseline "replicas=8 aggregation=asynchronous" \
	  --trace --out $(DEMO)
	@echo "Open $(DEMO)/report.html in a browser."

# The site: build/site/index.html. It executes the notebooks, which takes some minutes; a warning is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees . build/site
	@echo "Open build/site/index.html in a browser."

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "Installing Paceline and its dependencies into .venv; the first time, torch takes a while."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
