# keys35. `make demo` and `make test` start from a bare clone; `make checkpoint` is the same job on a GPU box.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Machines with an NVIDIA driver take the newest torch; the others a version that has a CPU build.
TORCH  ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
EXTRAS ?= $(if $(shell command -v nvidia-smi),[gpu],)
READY  := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
DEMO   := build/demo

.PHONY: demo test proof checkpoint lint wheel clean

demo: $(READY)
	$(BIN)/keys35 demo --work $(DEMO)/work --out $(DEMO)/out --table README.md

# A process per core with one thread each; files stay whole, because their tests share what they make.
test: $(READY_DEV)
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

proof: $(READY_DEV)
	$(BIN)/python -m pytest -q -m slow

checkpoint: $(READY)
	@test -n "$(MODEL)" -a -n "$(RECIPE)" -a -n "$(WORK)" -a -n "$(OUT)" || \
	  { echo "usage: make checkpoint MODEL=dir RECIPE=glm-5.3-2.75bpw WORK=dir OUT=dir [WORKERS=n]"; exit 2; }
	$(BIN)/keys35 run "$(MODEL)" --recipe "$(RECIPE)" --work "$(WORK)" --out "$(OUT)" --workers $(or $(WORKERS),0)

lint: $(READY_DEV)
	$(BIN)/ruff check keys35 tests

wheel: $(READY)
	$(BIN)/pip wheel -q --no-deps -w dist .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that no dependency pulls in another build of it.
$(READY): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.$(EXTRAS)'
	touch $@

$(READY_DEV): $(READY)
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

clean:
	rm -rf build dist $(VENV)
