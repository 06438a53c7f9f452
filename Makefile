# Needs Python >= 3.10 and make; everything else is installed into .venv (see scripts/bootstrap.py).
PYTHON ?= python3
PROFILE ?= ci
VENV := .venv/bin/python
TEST_BUILD := build/test

.PHONY: help demo test build wheel hub docs lint generate check compile gates pytest clean

help:
	@echo "make demo      generate, build for this machine's card and run examples/demo.py (on the CPU without a card)"
	@echo "make test      lint, check generated/, compile for sm89 and sm90a, gates, pytest; says how long each took"
	@echo "make build     build the extension into python/fp8cutlass (PROFILE=dev|ci|release, FP8CUTLASS_ARCHS)"
	@echo "make wheel     build and check a wheel with the kernels of every target (PROFILE; release if not given)"
	@echo "make hub       lay the package out for the kernels library of Hugging Face, into dist/hub (PROFILE as for wheel)"
	@echo "make docs      build the documentation into build/site; any warning is an error"
	@echo "make lint      ruff, mypy, clang-format"
	@echo "make generate  rewrite generated/"
	@echo "make clean     remove build outputs (.venv stays)"

demo:
	@$(PYTHON) scripts/bootstrap.py demo
	@$(VENV) scripts/demo.py

build:
	@$(PYTHON) scripts/bootstrap.py build
	@$(VENV) scripts/build_extension.py --profile $(PROFILE)

# manylinux_2_28, as auditwheel finds it; a later tag where a newer compiler needs more.
wheel hub: PROFILE := $(if $(filter command line environment,$(origin PROFILE)),$(PROFILE),release)
wheel:
	@$(PYTHON) scripts/bootstrap.py wheel
	@$(VENV) scripts/wheel.py --profile $(PROFILE)

hub:
	@$(PYTHON) scripts/bootstrap.py build
	@$(VENV) scripts/hub_layout.py --out dist/hub --profile $(PROFILE)

docs:
	@$(PYTHON) scripts/bootstrap.py docs
	@NO_MKDOCS_2_WARNING=1 $(VENV) -m mkdocs build --strict --quiet

generate:
	@$(PYTHON) scripts/bootstrap.py generate
	@$(VENV) -m codegen

lint:
	@$(PYTHON) scripts/bootstrap.py lint
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy
	@$(VENV) scripts/format_cpp.py --check

# One step after the other, whatever -j says: each is worth running only when the one before passed. Lint and check keep
# one core busy each, so they run side by side.
test:
	@$(PYTHON) scripts/bootstrap.py test
	@$(VENV) scripts/steps.py lint+check compile gates pytest

# Byte for byte: generated/ is what the generator writes.
check:
	$(VENV) -m codegen --check

# The extension of profile ci for both targets, which the gates take apart and the tests load.
compile:
	$(VENV) scripts/build_extension.py --profile ci --arch sm89 --arch sm90a --build-dir $(TEST_BUILD) --dest $(TEST_BUILD)/fp8cutlass

# Registers, spills, shared memory and instruction mix of every kernel that was built, against the committed report.
gates:
	$(VENV) -m codegen gates --profile ci --check --built $(TEST_BUILD)

pytest:
	$(VENV) -m pytest -n auto --dist loadgroup

clean:
	rm -rf build dist python/fp8cutlass/_C.so python/fp8cutlass/_built python/fp8cutlass/_generated
