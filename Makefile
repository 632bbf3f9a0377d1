# Each target is a plain command that you can type yourself; see the README. The environment is made once, in .venv.
PYTHON ?= python3
BIN := .venv/bin

help:
	@echo "make run     the three scripts in order on the default data, then the report (writes out/); it goes on where it was stopped"
	@echo "make test    the tests"
	@echo "make mutants puts 77 known bugs back, one at a time, and shows the test that catches each"
	@echo "make bench   how fast an iteration is, beside its matrix products alone (the workload default needs make run first)"
	@echo "make lint    ruff"
	@echo "make clean   removes out/, the default data and the environment"

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

run: .venv/ready
	$(BIN)/python train_sft.py --resume
	$(BIN)/python train_rm.py --resume
	$(BIN)/python train_ppo.py --resume

test: .venv/ready
	$(BIN)/python -m pytest

mutants: .venv/ready
	$(BIN)/python -m pytest tests/mutants

bench: .venv/ready
	$(BIN)/python -m bench.speed

lint: .venv/ready
	$(BIN)/ruff check .

clean:
	rm -rf out data/zoo .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help run test mutants bench lint clean
