# make train      a rising reward curve on tiny Countdown, on a CPU; ARGS="--steps 20" goes to the command
# make test       the tests but the slow ones, and two short lessons
# make lessons    all lessons executed, their outputs compared with the stored ones
# make slow       the slow tests: processes, runs that are killed, hostile answers
# make lab        Jupyter Lab on the first lesson; LAB="--no-browser" goes to it
# make book       lessons, pages and the reference of the code as a site, in build/book
# make notebooks  executes lessons and exercises again in place
# make lint       ruff
#
# .venv is made from requirements.txt by PYTHON, with PIP_FLAGS for pip. JOBS processes run the tests (default: one a core).

SHELL     := /bin/sh
PYTHON    ?= python3
PIP_FLAGS ?=
ARGS      ?=
LAB       ?=
JOBS      ?= auto

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/requirements.stamp
# One thread a process: two that share two cores with two threads each are many times slower than one.
RUN   := OMP_NUM_THREADS=1 $(PY)
TESTS := $(RUN) -m pytest -rs -n $(JOBS) --maxprocesses 8 --dist worksteal -p no:nbval
# A lesson to a process, since its cells share a kernel; in the order given, the long ones first.
NBVAL := $(RUN) -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder -p no:python \
	--nbval --nbval-current-env --nbval-cell-timeout=240

# A kernel or module of another environment must not be found before those of .venv.
unexport JUPYTER_PATH PYTHONPATH PYTHONHOME PIP_FLAGS

.DELETE_ON_ERROR:
.PHONY: train test lessons slow lab book notebooks lint

train: $(STAMP)
	$(PY) -m minidrl train tiny_configs/countdown20_cpu.yaml --out runs/countdown20_cpu $(ARGS)

test: $(STAMP)
	$(TESTS) -m "not slow" tests
	$(NBVAL) notebooks/01_*.ipynb notebooks/03_*.ipynb

lessons: $(STAMP)
	$(NBVAL) notebooks/00b_*.ipynb notebooks/00a_*.ipynb notebooks/00_*.ipynb notebooks/09_*.ipynb notebooks/10_*.ipynb \
		notebooks/0[4-68]_*.ipynb notebooks/1[12]_*.ipynb notebooks/0[1-37]_*.ipynb

slow: $(STAMP)
	$(TESTS) -m slow tests
	$(NBVAL) -p notebooks.conftest research/notebooks/*.ipynb

# From here, so that links to docs/ open; a kernel starts in the folder of its notebook.
lab: $(STAMP)
	$(PY) -m jupyter lab --ServerApp.root_dir=. $(LAB) notebooks/00_quickstart.ipynb

book: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable ".[book]"
	$(RUN) -m sphinx --quiet --conf-dir docs/book --doctree-dir build/doctrees . build/book

notebooks: $(STAMP)
	$(PY) notebooks/execute.py notebooks/*.ipynb notebooks/exercises/*.ipynb

# The package has 100 columns (minidrl/ruff.toml), its module of equations 88.
lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff check --line-length 88 minidrl/algorithms.py
	$(PY) -m ruff format --check .
	$(PY) -m ruff format --check --line-length 88 minidrl/algorithms.py

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
