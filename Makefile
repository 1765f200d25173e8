# PYTHON=python3.12 picks the interpreter, ARGS="..." is passed on to demo, test, bench and lock.
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench lint lock clean

VENV := .venv/bin

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

setup: ## make .venv with the locked packages and Quiver itself
	@scripts/setup

demo: setup ## see it work
	@$(VENV)/python -m quiver.cli.demo $(ARGS)

test: setup ## run the tests
	@$(VENV)/python -m pytest -n 2 --dist loadgroup $(ARGS)

bench: setup ## measure it
	@$(VENV)/python bench/run.py $(ARGS)

lint: setup ## check style and types
	@$(VENV)/ruff check --quiet
	@$(VENV)/ruff format --check --quiet
	@$(VENV)/mypy

lock: ## write requirements.lock from pyproject.toml; ARGS=--upgrade takes newer versions
	@scripts/lock $(ARGS)

clean: ## remove .venv, caches and build output
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
