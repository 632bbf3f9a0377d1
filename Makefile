# Each target is a plain command that you can type yourself; see the README. The environment is made once, in .venv.
PYTHON ?= python3
BIN := .venv/bin
# The tests run in one process per core; with SIDE_BY_SIDE= in a single one
SIDE_BY_SIDE := -n auto

help:
	@echo "make run     the three scripts in order on the default data, then the report (writes out/); it resumes where it was stopped"
	@echo "make test    the tests"
	@echo "make mutants puts known bugs back, one at a time: each makes a test fail"
	@echo "make lint    ruff"
	@echo "make check   lint, tests, mutants, and the three scripts on a tiny setting"
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
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --dist loadfile

mutants: .venv/ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -vv tests/mutants

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint test mutants scripts

# The three scripts and sample.py on 64 rows of each file
TINY := --data out/check/zoo --out out/check
scripts: .venv/ready
	rm -rf out/check
	$(BIN)/python -m data.zoo --out out/check/all --seed 1
	mkdir out/check/zoo
	for name in out/check/all/*.jsonl; do head -n 64 $$name > out/check/zoo/$${name##*/}; done
	$(BIN)/python train_sft.py $(TINY) --layers 1 --channels 32 --context 64 --epochs 200 --steps 200
	$(BIN)/python train_rm.py $(TINY) --epochs 100 --steps 100
	$(BIN)/python train_ppo.py $(TINY) --steps 2 --batch_size 16 --max_new_tokens 16
	echo "What does a bee eat?" | $(BIN)/python sample.py out/check/ppo.pt --n 2
	rm -r out/check

clean:
	rm -rf out data/zoo .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help run test mutants lint check scripts clean
