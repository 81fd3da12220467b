# `make demo` and `make test` install what they need into .venv; nothing is done twice.
PYTHON ?= python3
VIDEOS ?=
BIN := .venv/bin

.PHONY: demo test test-all test-systems fuzz lint clean image image-base image-buildah bench-gpu pins

# Videos -> shards -> pre-training -> figures -> report, on synthetic videos, or on yours: make demo VIDEOS=folder.
# OPTIONS are those of `adamae shards`, such as OPTIONS="--group-by folder:2".
OPTIONS ?=

demo: .venv/installed
	$(BIN)/adamae demo $(if $(VIDEOS),"$(VIDEOS)") $(OPTIONS)

# worksteal keeps most of a file's tests, and so its fixtures, in one process.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

test: .venv/installed-dev
	$(PYTEST) -m "not slow"

test-all: .venv/installed-dev
	$(PYTEST)

# Scenarios on real systems (Slurm, Ray); installs nothing, and says what is missing.
test-systems: .venv/installed-dev
	$(BIN)/python -m pytest -rs tests/systems

# Random cases for MINUTES, another seed every time.
MINUTES ?= 60

fuzz: .venv/installed-dev
	PYTHONPATH=tests:tests/shard_tools OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_budgets.py
	$(BIN)/python tests/check_words.py
	$(BIN)/codespell

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else "error: Python 3.11 to 3.14 is needed, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing PyTorch with CUDA, DALI and others into .venv: 7.3 GB. Without a GPU, README has a smaller way."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cuda13]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

pins: .venv/installed-dev  # after changing a range in pyproject.toml: install without constraints first
	(head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable) > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The training container, built by Docker or, if no Docker daemon is running, by buildah (as root) on a Debian made by
# debootstrap. The host's pip settings and certificates, if any, are readable during the installation only.
IMAGE ?= adamae
BUILDAH := STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot buildah
secret = $(if $(wildcard $(2)),--secret id=$(1)$(comma)src=$(2))
comma := ,
SECRETS = $(call secret,pip_settings,$(or $(PIP_CONFIG_FILE),/etc/pip.conf)) \
  $(call secret,certificates,$(or $(PIP_CERT),$(SSL_CERT_FILE),/etc/ssl/certs/ca-certificates.crt))

image:
	@if docker info >/dev/null 2>&1; then set -x; DOCKER_BUILDKIT=1 docker build --tag $(IMAGE) $(SECRETS) .; \
	elif command -v buildah >/dev/null; then $(MAKE) --no-print-directory image-buildah; \
	else echo "error: no Docker daemon is running and there is no buildah: start Docker, or apt-get install buildah debootstrap" >&2; exit 1; fi

image-base:
	$(BUILDAH) inspect --type image adamae-base >/dev/null 2>&1 || { set -e; \
	  folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  debootstrap --variant=minbase bookworm "$$folder/root"; \
	  tar --create --directory "$$folder/root" --exclude './dev/*' --file "$$folder/root.tar" .; \
	  printf 'FROM scratch\nADD root.tar /\n' | $(BUILDAH) bud --tag adamae-base --file - "$$folder"; }

image-buildah: image-base
	$(BUILDAH) bud --pull-never --build-arg BASE=localhost/adamae-base --tag $(IMAGE) $(SECRETS) .

# All GPU tests and benchmarks, in stages of at most 8 minutes (benchmarks/on_gpu.sh), into benchmarks/results/<gpu>/:
# `make bench-gpu STAGES="step tests"` runs some of them, VIDEOS=folder on your own videos.
# A preinstalled PyTorch is used with GPU_PYTHON=python3; nothing is then installed, and a stage that lacks a module fails
# and names it.
STAGES ?=
GPU_PYTHON ?= $(BIN)/python
GPU_NAME = import sys, torch; print(torch.cuda.get_device_name().lower().replace(" ", "-")) \
  if torch.cuda.is_available() else sys.exit("error: no CUDA device")

bench-gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),.venv/installed-dev)
	name=$$($(GPU_PYTHON) -c '$(GPU_NAME)') && \
	  PYTHON=$(GPU_PYTHON) VIDEOS="$(VIDEOS)" bash benchmarks/on_gpu.sh "benchmarks/results/$$name" $(STAGES)
