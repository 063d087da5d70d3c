# make train    train the example language model in a fresh virtual environment; ARGS='--help' shows its options
# make test     run the tests; ARGS='-k deferred' and the like go to pytest
# make lint     ruff and mypy
# make bench    time the layer on this CPU and write benchmarks/results/cpu.json
# make wheel    build the wheel and try it in an environment of its own, beside torch alone
# make clean    remove the environment, the wheel and all caches
#
# Which torch: pip's default for TORCH, which on Linux is a CUDA build from PyPI. It also runs without a GPU, but is
# several GB; for a CPU build, or one for another CUDA version, give the package index that has it:
#     make train TORCH_INDEX=<index address>
# To use the torch that PYTHON already has, a GPU build for instance:
#     make train PYTHON=python3 VENV_FLAGS=--system-site-packages
# The environment is made once: after a change of these variables, `make clean` first.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WHEEL_VENV := build/wheel-venv
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet
INSTALL_TORCH := $(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'

.DELETE_ON_ERROR:
.PHONY: venv train test lint bench wheel clean

train: venv
	$(BIN)/python examples/train_moe_lm.py $(ARGS)

test: venv
	$(BIN)/python -m pytest $(ARGS)

lint: venv
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

bench: venv
	$(BIN)/python -m benchmarks.cpu $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python $(INSTALL_TORCH)
	$(BIN)/python $(PIP_INSTALL) --editable '.[test,examples,benchmarks]'
	touch $@

# The wheel without its dependencies, beside torch alone; run outside the checkout, so that nothing comes from there.
# Its environment goes once that has worked: with a CUDA build of torch it is several GB.
wheel: venv
	rm -rf dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python $(INSTALL_TORCH)
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) --no-deps dist/*.whl
	$(WHEEL_VENV)/bin/python -I tests/smoke.py
	rm -rf $(WHEEL_VENV)

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
