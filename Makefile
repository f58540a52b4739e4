# Every target sets up what it needs first; scripts/setup.sh says how, and does it once.
#   make test PYTHON=python3.12    another interpreter
#   make test VENV=../venv        another place for the virtual environment
#   make test TORCH=cpu            torch's CPU build, whatever this machine has (or TORCH=cuda)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= auto
# The releases of torch that the library supports, one patch of each; nightly is allowed too.
RELEASES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
# Some container images set it. Each process would compile all that it imports: seconds a rank.
unexport PYTHONDONTWRITEBYTECODE

# Of files in the order of SECONDS in tests/tiers.py, and not those of the most tests first.
BY_FILES := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: quickstart reproduce check test ci lint unit docs archive mutants gpu gpu-cluster gpu-waiting wheels versions setup baselines clients pins clean help

quickstart: setup ## FCDP next to ZeRO-3 on this machine: table, figure, report
	$(VENV)/bin/python -m experiments run quickstart

# All matrices that have records there; or those of EMULATED="a b".
reproduce: setup ## all matrices of results anew, then REPRODUCTION.md and its page (says how long; goes on)
	$(VENV)/bin/python -m scripts.reproduce $(EMULATED)
	$(VENV)/bin/python -m experiments bound --output results/bound
	$(VENV)/bin/python -m experiments validate
	$(VENV)/bin/python -m simulation.files results
	$(VENV)/bin/python -m analysis report

check: setup ## linters, types and unit tests: before each commit
	@$(MAKE) --no-print-directory --output-sync -j 2 lint unit

unit: setup
	$(VENV)/bin/python -m pytest -q -m unit -n 2 $(BY_FILES)

# The linters run beside the tests, and say what they have to say at once. Types are one process's
# half minute where no cache has them: with several, mypy would take more of what the tests need.
beside_lint = @MYPY_NUM_WORKERS=0 $(MAKE) --no-print-directory --output-sync -j 2 -o setup lint & lint=$$!; \
	status=0; $(1) || status=$$?; \
	wait $$lint || { echo "lint failed: see above" >&2; exit 1; }; exit $$status

test: setup ## linters and types, beside them all tiers of tests but system; of tests on ranks the first row
	$(call beside_lint,$(VENV)/bin/python -m pytest -q -m "not system and not drawn" -n 2 $(BY_FILES))

# Three processes: tests of the tier `system` wait for others a good part of their time. Of further
# rows, and of files of minutes, each commit draws some; DRAWN= runs all of them.
DRAWN = $(shell git rev-parse HEAD 2>/dev/null)
ci: setup ## the same, and whole cells, documentation, packaging, sshd, Slurm, Docker
	$(call beside_lint,$(VENV)/bin/python -m pytest -q -n 3 $(BY_FILES) --durations 30 $(if $(DRAWN),--drawn $(DRAWN)))

lint: setup ## linters, directions of imports and types alone
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/mypy

docs: setup ## the documentation as a site, in build/site; fails at a warning
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(VENV)/bin/python -m mkdocs build --strict

archive: ## all tracked files as build/fcdp-COMMIT.tar.gz, with the checksum of each in SHA256SUMS
	rm -rf build/archive && mkdir -p build/archive
	git archive --prefix fcdp/ HEAD | tar -x -C build/archive
	cd build/archive/fcdp && find . -type f -not -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum > SHA256SUMS
	tar -c -C build/archive --sort name --mode a+rX,go-w --owner 0 --group 0 --mtime "$$(git log -1 --format=@%ct)" fcdp \
		| gzip -n9 > build/fcdp-$$(git rev-parse --short HEAD).tar.gz
	rm -rf build/archive && sha256sum build/fcdp-$$(git rev-parse --short HEAD).tar.gz

# An hour of one core where nothing was tried before; it gives way to whatever else runs.
mutants: setup ## small faults in fcdp/, one at a time: which do the tests catch
	$(VENV)/bin/python -m scripts.mutants $(MUTANTS)

# With PYTHON=, one that has PyTorch and, but for `make wheels`, what the tests import: a machine with
# a GPU may have no network.
OWN := $(if $(filter file,$(origin PYTHON)),,yes)
INTERPRETER := $(if $(OWN),$(PYTHON),$(VENV)/bin/python)
gpu gpu-cluster gpu-waiting: export PYTHONPATH := $(if $(OWN),$(CURDIR)/build/site$(addprefix :,$(PYTHONPATH)),$(PYTHONPATH))
READY := $(if $(OWN),build/site,setup)
MARKED := -m pytest -v -m gpu --tb short --timeout 200 -o junit_family=xunit1
NAMELESS := sed -Ei 's/ hostname="[^"]*"//; s,/[^ "<>&]*/((site|dist)-packages|lib/python3[.0-9]*)/,,g; s,$(CURDIR)/,,g' results/gpu/*.xml

gpu: SPEED := tests/fcdp/cuda/test_overlap.py tests/fcdp/cuda/test_differences.py
gpu: TRAINING := tests/fcdp/cuda/test_parity.py tests/fcdp/cuda/test_memory.py tests/simulation/imitated/test_on_cuda.py
gpu: $(READY) ## all that waits for a GPU, in 6 minutes: results/gpu
	mkdir -p results/gpu
	status=0; \
	$(INTERPRETER) $(MARKED) --session-timeout 150 --junitxml results/gpu/speed.xml --keep results/gpu $(SPEED) || status=1; \
	TORCH_CUDA_SANITIZER=1 $(INTERPRETER) $(MARKED) --session-timeout 180 --junitxml results/gpu/streams.xml \
		$$(grep -rl 'mark\.gpu' tests/fcdp --include 'test_*.py' --exclude-dir cuda) & \
	$(INTERPRETER) $(MARKED) -n 4 --dist loadgroup --session-timeout 300 --junitxml results/gpu/training.xml $(TRAINING) || status=1; \
	wait $$! || status=1; \
	$(NAMELESS); \
	FCDP_HOSTS=localhost $(INTERPRETER) -m experiments preflight --cluster rented --output results/gpu/preflight.json || status=1; \
	exit $$status

# What has run when its time is over stays, and the same command goes on from there.
within = timeout --signal INT $(1) $(INTERPRETER) -m experiments run --resume --no-wandb

# Without a GPU it is a rehearsal, with a model of two blocks.
gpu-cluster: LASTS := 500
gpu-cluster: OUTPUT := runs/one-gpu-cluster
gpu-cluster: SMALL := $(if $(wildcard /proc/driver/nvidia/version),,--set model=llama-2x64 --set sequence_length=64)
gpu-cluster: export OMP_NUM_THREADS ?= $(shell echo $$((($$(nproc) + 3) / 4)))
gpu-cluster: $(READY) ## two nodes of two ranks on one GPU, 1.1 billion parameters, in 9 minutes (LASTS=500 s)
	$(call within,$(LASTS)) one-gpu-cluster --output $(OUTPUT) $(SMALL) $(if $(CELLS),--only '$(CELLS)') \
		|| { [ $$? = 124 ] && $(INTERPRETER) -m analysis report $(OUTPUT) --output $(OUTPUT)/report; }

# What no GPU has run yet, or not since it was mended.
gpu-waiting: WAITING := lost or slices or sums or extension or copies
gpu-waiting: $(READY) ## what waited for a GPU, in 3 minutes: results/gpu/waiting.xml, runs
	mkdir -p results/gpu
	status=0; \
	$(INTERPRETER) $(MARKED) -n 2 --session-timeout 150 --junitxml results/gpu/waiting.xml --keep results/gpu \
		-k '$(WAITING)' $$(grep -rl 'mark\.gpu' tests/fcdp --include 'test_*.py') & \
	for matrix in one-gpu-strategies one-gpu-out-of-core; do \
		$(call within,80) $$matrix || [ $$? = 124 ] || status=1; \
	done; \
	wait $$! || status=1; $(NAMELESS); exit $$status

# Wheels for another machine, which has CPython $(FOR) and PyTorch.
FOR ?= 3.12
CARRIED := annotated-types backports.zstd pydantic pydantic-core pyroute2 pyzmq typing-extensions typing-inspection
wheels: setup ## what a machine with PyTorch and no network lacks, in build/wheels (FOR=3.12, its Python)
	rm -rf build/wheels
	$(VENV)/bin/python -m pip download --no-deps --only-binary=:all: --python-version $(FOR) \
		$(foreach tag,2_28 2_27 2_17 2_12,--platform manylinux_$(tag)_x86_64) --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest build/wheels $(CARRIED)

build/site: $(wildcard build/wheels/*.whl)
	$(if $^,$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $@ $^,mkdir -p $@)

# One environment at a time: a CUDA build is some 5 GB.
versions: setup ## the library's tests on each torch of RELEASES="2.11.0 2.15.0": results/versions
	@$(MAKE) --no-print-directory clients || true
	status=0; \
	for release in $(RELEASES); do \
		PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh --torch $$release \
			&& '$(VENV)'-$$release/bin/python -m scripts.versions $$release || status=1; \
		rm -rf '$(VENV)'-$$release; \
	done; \
	exit $$status

# DeepSpeed compiles an operator where it is first used: the first cell would wait for it, a minute.
setup: ## make the virtual environment with everything in it
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh
	@test -e $(VENV)/operators/stamp -o ! -e $(VENV)/deepspeed.stamp || { echo "setup: compiling DeepSpeed's operator ..."; \
		$(VENV)/bin/python -m baselines.deepspeed.engine >/dev/null 2>&1 && mkdir -p $(VENV)/operators && touch $(VENV)/operators/stamp \
		|| echo "setup: it could not be compiled; cells of DeepSpeed try it again"; }

baselines: ## setup, and beside it an environment with the DeepSpeed of the paper
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh --pins

clients: ## setup, and beside it an environment with other people's trainers
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh --clients

pins: ## write constraints.txt anew (PINS=--upgrade for newer versions)
	PYTHON='$(PYTHON)' scripts/pins.sh $(PINS)

clean: ## remove the virtual environments and all caches; results stay
	rm -rf '$(VENV)' '$(VENV)-paper' '$(VENV)-clients' $(RELEASES:%='$(VENV)-%') build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
