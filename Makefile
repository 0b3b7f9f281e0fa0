# `make demo` trains a tiny model from nothing; `make test` runs the checks and the tests. Both make .venv when it is missing.

# Python 3.11; another place: make test PYTHON=/path/to/python3.11
PYTHON ?= python3.11
# An extra package index for torch alone, where the default one offers only its CUDA build; for example
# make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

PY := .venv/bin/python
STAMP := .venv/.vime-setup-done

.PHONY: demo test test-fast test-juicefs test-browser test-all lint docs docs-site setup clean

demo: $(STAMP)
	.venv/bin/vime demo

# Everything but the tests marked slow, browser (`make test-browser`) and gpu (needs CUDA). Where nothing can be mounted,
# those of JuiceFS are skipped.
test: lint
	$(PY) -m pytest -m "not slow and not browser and not gpu"

# No server, no second process: seconds.
test-fast: $(STAMP)
	$(PY) -m pytest -m "not slow and not engine and not multiproc and not juicefs and not browser and not gpu"

# JuiceFS on Redis and an S3 endpoint, with clients and processes that are killed. Needs /dev/fuse and redis-server, and
# of users other than root fuse3; it fails where they are missing, and says what to install.
test-juicefs: $(STAMP)
	VIME_REQUIRE_JUICEFS=1 $(PY) -m pytest -m juicefs tests/juicefs

# The pages of `vime view` and `vime report` in Chromium, on a stored and on a live run; their pictures go to
# build/screenshots. With VIME_PICTURED_RUN they are of that run, and are those of the documents (docs/images).
# It fails without Chromium, and says what to install.
test-browser: $(STAMP)
	VIME_REQUIRE_BROWSER=1 VIME_SCREENSHOTS=$(if $(VIME_PICTURED_RUN),docs/images,build/screenshots) $(PY) -m pytest -m browser tests/browser

test-all: lint
	$(PY) -m pytest

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

# Pages that are made from the code.
docs: $(STAMP)
	PYTHONPATH=. $(PY) scripts/generate_flags_doc.py
	$(PY) scripts/generate_metrics_doc.py
	$(PY) scripts/generate_performance_doc.py

# The pages as a site in build/site; it opens from there.
docs-site: $(STAMP)
	$(PY) -m mkdocs build --strict --quiet

setup: $(STAMP)

$(STAMP): $(wildcard requirements/*.txt) scripts/setup_cpu.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found, needed: Python 3.11. Install it or name it: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), needed: Python 3.11. Install it or name it: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) scripts/setup_cpu.py --torch-index "$(TORCH_INDEX)"

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
