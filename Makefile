# The two commands of the README are `make train` and `make test`; both set up what they need.
# Extra arguments go through ARGS, e.g. `make train ARGS="--steps 20"`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

# One shared cache of compiled kernels, and no probe of the vector ISA at every cold compile.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export TORCHINDUCTOR_VEC_ISA_OK ?= 1

.PHONY: help train test test-all test-exhaustive check house first-lines docs docs-pages bench bench-memory bench-serve bench-trust faults soak setup setup-dev clean

help:
	@echo "make train   train the built-in model on two processes     (ARGS=... go to torchloom train)"
	@echo "make test    every check and every test, sweeps in part    (ARGS=... go to pytest)"
	@echo "make test-all   the same with every case of most sweeps    (ARGS=... go to pytest)"
	@echo "make test-exhaustive   the tests that take many cases each    (ARGS=... go to pytest)"
	@echo "make faults  what users meet when ranks fail or differ     (ARGS=... go to faults.matrix)"
	@echo "make check   ruff, import-linter, type checker"
	@echo "make house   the source in numbers, by room               (ARGS=... are folders)"
	@echo "make first-lines   what each module says of itself"
	@echo "make docs    build the site in docs/_build/html; warnings are errors"
	@echo "make docs-pages   rewrite the generated parts of docs/, which tests compare"
	@echo "make bench   torchloom beside its peers                    (ARGS=... go to bench/train.py)"
	@echo "make bench-memory   peak memory against step time          (ARGS=... go to bench/memory.py)"
	@echo "make bench-serve    every batch size with one compile      (ARGS=... go to bench/serve.py)"
	@echo "make bench-trust    names, saves, digests, damage          (ARGS=... go to bench/trust.py)"
	@echo "make soak    killed again and again, and the same weights  (ARGS=... go to bench/soak/run.py)"

setup: $(VENV)/.run-ready
setup-dev: $(VENV)/.dev-ready

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,docs,hf,lightning,tensorboard,trl]'
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.run-ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs,hf,lightning]'
	@touch $@

train: setup
	$(BIN)/torchloom train $(ARGS)

test: setup-dev check
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

test-all: setup-dev check
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not exhaustive' $(ARGS)

test-exhaustive: setup-dev
	$(BIN)/python -m pytest -m exhaustive $(ARGS)

faults: setup-dev
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m faults.matrix $(ARGS)

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

house:
	$(PYTHON) tools/house.py $(ARGS)

first-lines:
	@$(PYTHON) tools/house.py --first-lines

docs: $(VENV)/.docs-ready
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html $(ARGS)
	@echo "open docs/_build/html/index.html"

docs-pages: setup-dev
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m docs_pages

bench: setup-dev
	$(BIN)/python bench/train.py $(ARGS)

bench-memory: setup-dev
	$(BIN)/python bench/memory.py $(ARGS)

bench-serve: setup-dev
	$(BIN)/python bench/serve.py $(ARGS)

bench-trust: setup-dev
	$(BIN)/python bench/trust.py $(ARGS)

soak: setup-dev
	$(BIN)/python bench/soak/run.py $(ARGS)

clean:
	rm -rf $(VENV) .cache build dist runs docs/_build
