# make demo: install, then train the tiny model and draw its accuracy curve.  make test: install, then run the tests.
# Needs Python 3.11 or 3.12, git and a package index; everything goes into $(VENV).

VENV ?= .venv
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The packages do not need a model hub; bytecode is worth its minute: a run starts a dozen Python processes.
export HF_HUB_OFFLINE ?= 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-unit test-e2e lint format results study benchmarks constraints clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml requirements/constraints-cpu.txt requirements/override-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; name one with make PYTHON=/path/to/python"; exit 1; }
	@echo "== installing into $(VENV) with $(PYTHON) (about 6 GB; one to five minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode \
		--override requirements/override-cpu.txt --constraint requirements/constraints-cpu.txt --editable '.[cpu,dev]'
	$(BIN)/python -m opd_recipes.backends.vllm_metadata
	@touch $@

demo: $(STAMP)
	$(BIN)/opd_recipes demo

test: test-unit test-e2e

test-unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit

test-e2e: $(STAMP)
	$(BIN)/python -m pytest tests/e2e

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The committed results of docs/results: three seeds of the demo.
results: $(STAMP)
	$(BIN)/opd_recipes demo --seeds 0 1 2 --out runs/results --publish docs/results

# Every recipe, comparator and control, three seeds each: hours. Stop it at any time, it goes on where it was. JOBS=2 with 20 GB.
JOBS ?= 1
study: $(STAMP)
	$(BIN)/opd_recipes study --jobs $(JOBS) --publish docs/results

# Memory and time against the plain way, and what a start and a step are made of: a quarter of an hour on an idle machine.
benchmarks: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.startup

# After changing a version in setup.cfg: install without constraints, test, then write them anew.
constraints:
	$(BIN)/uv pip freeze --python $(BIN)/python | grep -v -e '^-e' -e '^vllm==' -e '^opd' > requirements/constraints-cpu.txt

clean:
	rm -rf $(VENV) runs outputs build *.egg-info
