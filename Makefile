# Each target is a plain command that you can type yourself; see the README. The environment is made once, in .venv.
PYTHON ?= python3
BIN := .venv/bin

help:
	@echo "make run     the three scripts in order on the default data, then the evaluation (writes out/); resumes where it was stopped"
	@echo "make test    the tests"
	@echo "make mutants puts known bugs back, one at a time: each makes a test fail"
	@echo "make lint    ruff"
	@echo "make check   lint, tests and mutants"
	@echo "make clean   removes the environment and caches; trained models stay"

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

run: .venv/ready
	$(BIN)/python train_sft.py --resume
	$(BIN)/python train_rm.py --resume
	$(BIN)/python train_ppo.py --resume
	$(BIN)/python evaluate.py out

test: .venv/ready
	$(BIN)/python -m pytest -n auto --dist loadfile

mutants: .venv/ready
	$(BIN)/python -m pytest -n auto tests/mutants

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint test mutants

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help run test mutants lint check clean
