# Nine verbs; each makes .venv from requirements.txt when it is missing or older than that file.
#
#   make train        a rising reward curve on tiny Countdown, on a CPU
#   make test         all tests but the slowest, then every lesson, with its stored outputs compared
#   make chaos        the slowest tests; faults: runs killed at every file operation, damaged, without disk; verifiers
#                     fuzzed; then the notebooks that go with a lesson and measure more (05a, ...), compared too
#   make lab          Jupyter Lab on the first notebook; LAB="--no-browser --port 8890" passes options to it
#   make extras       what one of the examples needs beside requirements.txt
#   make notebooks    execute the notebooks and exercises again in place; a clean tree stays clean
#   make lint         ruff on the code and the notebooks
#   make pages        what is generated from the sources: tables of docs/, links to lines, the map of notebook 10
#   make leaderboard  LEADERBOARD.md from results/; STUDY=research/studies/x.yaml runs first what research/results/ledger.csv lacks of it,
#                     METHODS=a,b of these methods only; the laws first of all
#
# PYTHON=python3.12        the interpreter that .venv is made from (3.11 or newer)
# PIP_FLAGS="..."          passed to pip, e.g. torch without CUDA:
#   make train PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# ARGS="..."               added to the train command, e.g. make train ARGS="--steps 20"
# FUZZ="--programs 100000" hostile programs in `make chaos`, for its 2,000 (`make test` has 200): an hour of two cores
# JOBS=4                   processes of `make test`, of one thread each (default: one a core, at most 8)

SHELL     := /bin/sh
PYTHON    ?= python3
PIP_FLAGS ?=
ARGS      ?=
LAB       ?=
JOBS      ?= auto

VENV  := .venv
PY    := $(VENV)/bin/python
# One thread a process: two that share two cores with two threads each are many times slower than one.
SUITE := OMP_NUM_THREADS=1 $(PY) -m pytest -rs -n $(JOBS) --maxprocesses 8 --dist worksteal -p no:nbval
# One notebook to a process (loadfile), whose cells share a kernel and run in order; in the order given, the long ones first.
NBVAL := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder -p no:python \
	--nbval --nbval-current-env --nbval-cell-timeout=240
STAMP := $(VENV)/requirements.stamp

# A kernel or module of another environment must not be found before those of .venv.
unexport JUPYTER_PATH PYTHONPATH PYTHONHOME PIP_FLAGS

.DELETE_ON_ERROR:
.PHONY: train extras test chaos lab notebooks lint pages leaderboard

train: $(STAMP)
	$(PY) -m minidrl train tiny_configs/countdown20_cpu.yaml --out runs/countdown20_cpu $(ARGS)

test: $(STAMP)
	$(SUITE) -m "not slow" tests
	$(NBVAL) notebooks/00[ab]_*.ipynb notebooks/0[4-9]_*.ipynb notebooks/07a_*.ipynb notebooks/1[0-9]_*.ipynb notebooks/10b_*.ipynb \
		notebooks/0[0-3]_*.ipynb

# What one example needs, and its test, which is skipped without it.
extras: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) trl==1.16.0

chaos: $(STAMP)
	$(SUITE) -m slow tests
	$(PY) tests/chaos.py
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py $(FUZZ)
	OMP_NUM_THREADS=1 $(PY) tests/fuzz_mathematics.py
	$(NBVAL) notebooks/0[1-9]a_*_measured.ipynb notebooks/1[01]a_*.ipynb

# From here, so that links to docs/ and notebooks/exercises/ open; a kernel starts in the folder of its notebook.
lab: $(STAMP)
	$(PY) -m jupyter lab --ServerApp.root_dir=. $(LAB) notebooks/00_quickstart.ipynb

notebooks: $(STAMP)
	@set -- notebooks/*.ipynb notebooks/exercises/*.ipynb; if [ -e "$$1" ]; then set -x; $(PY) notebooks/execute.py "$$@"; fi

# The package has 100 columns (minidrl/ruff.toml), its module of equations 88.
lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff check --line-length 88 minidrl/algorithms.py
	$(PY) -m ruff format --check .
	$(PY) -m ruff format --check --line-length 88 minidrl/algorithms.py

pages: $(STAMP)
	$(PY) research/benchmarks/readme.py
	$(PY) -m minidrl.run.index
	$(PY) notebooks/execute.py notebooks/10_the_map.ipynb notebooks/10[ab]_*.ipynb

leaderboard: $(STAMP)
	$(PY) research/benchmarks/leaderboard.py $(if $(STUDY),--study $(STUDY)) $(if $(METHODS),--methods $(METHODS))

$(STAMP): requirements.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	echo "error: $(PYTHON) not found; on Debian or Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "error: minidrl needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import venv, ensurepip' >/dev/null 2>&1 || { \
	echo "error: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: sudo apt install $$($(PYTHON) -c \
	'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@echo "minidrl: installing requirements.txt into $(VENV) (this takes some minutes the first time)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r requirements.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps --editable .
	@touch $@
