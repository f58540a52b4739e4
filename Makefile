# Every target sets up what it needs first; scripts/setup.sh says how, and does it once.
#   make test PYTHON=python3.12    another interpreter
#   make test VENV=../venv        another place for the virtual environment
#   make test TORCH=cpu            torch's CPU build, whatever this machine has (or TORCH=cuda)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= auto

.DEFAULT_GOAL := help
.PHONY: quickstart test lint setup baselines pins clean help

quickstart: setup ## FCDP next to ZeRO-3 on this machine: table, figure, report
	$(VENV)/bin/python -m experiments run quickstart

test: lint ## linters and types, then the tests
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile

lint: setup ## linters and types alone
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

setup: ## make the virtual environment with everything in it
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh

baselines: ## setup, and beside it an environment with the DeepSpeed of the paper
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' scripts/setup.sh --pins

pins: ## write constraints.txt anew (PINS=--upgrade for newer versions)
	PYTHON='$(PYTHON)' scripts/pins.sh $(PINS)

clean: ## remove the virtual environments and all caches; results stay
	rm -rf '$(VENV)' '$(VENV)-paper' build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 14
