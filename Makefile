# make, make verify   a machine with Python and make gets .venv; then spec to verified kernels, all on the CPU
# make test           the same set-up; every check and test of the project
# make test VENV=/tmp/venv PYTHON=python3.12
.PHONY: verify test lint clean

PYTHON ?= python3
VENV ?= .venv
SPEC ?= mamba2
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

verify: $(READY)
	$(BIN)/ssdgen build $(SPEC) --jobs $(JOBS)
	$(BIN)/ssdgen verify $(SPEC) --device cpu

test: lint
	$(BIN)/ssdgen generate --check
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ssdgen generated

# The environment, made once: the stamp is written last, so that a set-up that was cut short is done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ssdgen needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
