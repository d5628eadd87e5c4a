# Two commands do everything: `make demo` and `make test`. Each makes .venv first if need be.
.PHONY: demo test test-gpu sanitize-gpu test-sglang check format bench bench-gpu bench-full bench-sglang soak fuzz clean
.DELETE_ON_ERROR:

# The newest interpreter that is new enough; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin

# Installed anew when the dependencies or the compiled helpers change.
.venv/installed: pyproject.toml setup.py engram_client/_native.c engram_server/_pump.c
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python tests/demo.py

test: check
	$(BIN)/python -m pytest

# Format, lint and types.
check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Ratios against named baselines in the same run; not part of the tests.
bench: .venv/installed
	$(BIN)/python -m tests.bench

# For a machine with GPUs.
test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu tests/gpu

# The kernels under compute-sanitizer, which comes with a CUDA toolkit; api errors are not asked for, because the bindings
# and torch look for calls that an older driver does not have. Minutes.
SANITIZER ?= compute-sanitizer
sanitize-gpu: .venv/installed
	set -e; for tool in memcheck racecheck initcheck; do \
		$(SANITIZER) --tool $$tool --report-api-errors no --error-exitcode 9 $(BIN)/python -m pytest -m gpu -o timeout=900 \
			tests/gpu/test_gather.py tests/gpu/test_digest.py -k "not four_gib and not captured and not failed_driver_call"; done

# SGLang's kernels, to compare with: its wheel alone, for they import torch and Triton only.
.bench-sglang/installed: tests/sglang/requirements.txt .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) \
		"$$(grep '^sglang==' $<)"
	touch $@

SGLANG_KERNELS := .bench-sglang/sglang/kernels/ops/embeddings/engram_gather.py

bench-gpu: .venv/installed .bench-sglang/installed
	$(BIN)/python -m tests.bench.gather_gpu --sglang $(SGLANG_KERNELS)
	$(BIN)/python -m tests.bench.client_gpu
	$(BIN)/python -m tests.bench.load_gpu
	if [ $$(nvidia-smi --list-gpus | wc -l) -ge 2 ]; then \
		$(BIN)/python -m tests.bench.groups --sglang $(SGLANG_KERNELS) && \
		$(BIN)/python -m tests.bench.predict bench-results/groups.csv; fi
	$(BIN)/python -m tests.bench.bars

# Tables of full size, whole in host memory and split over two GPUs: 200 GiB of each.
bench-full: .venv/installed
	$(BIN)/python -m tests.bench.full_size
	$(BIN)/python -m tests.bench.bars

# The long forms of the kill and churn tests: 200 daemons and 200 ranks killed, 64 clients for five minutes beside a
# daemon that restarts. About an hour, and three GiB of memory; ENGRAM_SEED=n for other moments.
soak: .venv/installed
	ENGRAM_SOAK=1 $(BIN)/python -m pytest tests/system/test_kill.py tests/system/test_cuts.py

# A million frames to the decoders and to a live daemon, then as many guided by coverage.
fuzz: .venv/installed
	ENGRAM_SOAK=1 $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	$(BIN)/python -m tests.fuzz.guided -runs=1000000

# The real SGLang beside ours, in an environment of its own: the wheel, and the few packages that its Engram layer
# imports. Needs the Python versions that SGLang has wheels for. Where there are GPUs, SGLang's kernels on them too;
# tests/sglang/run_gpu.sh does that where nothing can be downloaded.
.venv-sglang/installed: tests/sglang/requirements.txt pyproject.toml setup.py engram_client/_native.c engram_server/_pump.c
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 setuptools
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

test-sglang: .venv-sglang/installed
	.venv-sglang/bin/python -m pytest tests/sglang

bench-sglang: .venv-sglang/installed
	.venv-sglang/bin/python -m tests.sglang.bench

clean:
	rm -rf .venv .venv-sglang .bench-sglang build *.egg-info engram_client/_native*.so engram_server/_pump*.so
