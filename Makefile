# Two commands; each sets up everything it needs in .venv on a machine with Python 3.11+ and make.
#   make demo   see the method at work: all experiments with few seeds, and a page that shows them
#   make test   lint, types and tests
.PHONY: demo test bench chaos figures cifar10 divided cifar10-all tried changed pooled uci marmousi clean
.DEFAULT_GOAL := demo
PYTHON ?= python3
BIN := .venv/bin

demo: .venv/ready
	rm -rf out/demo
	$(BIN)/twinboot reproduce --quick --out out/demo

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto

# For the docs: docs/results and docs/figures.
figures: .venv/ready
	rm -rf out/full
	$(BIN)/twinboot reproduce --full --out out/full
	$(BIN)/twinboot report out/full --page docs/results
	$(BIN)/python examples/deblur.py docs/figures/deblur.png

# Else the allocator of Linux gives the memory of each step back and asks for it again: a step takes 1.13 times as long.
cifar10 divided cifar10-all tried changed pooled: export MALLOC_MMAP_THRESHOLD_ = 1073741824
cifar10 divided cifar10-all tried changed pooled: export MALLOC_TRIM_THRESHOLD_ = 4294967296

# The image experiment on CIFAR-10: make cifar10 DATA=DIR, with the official files in DIR, and those of Fashion-MNIST as
# images of another kind. Five seeds of eight methods take two to three hours on two cores; a run that is stopped goes
# on.
cifar10: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# Twins that divide those 5,000 images between them, beside MC dropout, which trains on all of them, too. 40 minutes.
divided: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --methods dropout twins-split --jobs 2 --out out/divided
	$(BIN)/twinboot report out/divided --page docs/divided.md --prefix divided- --title "Twins that divide the images" \
		--about "Two twins leave 13.5 % of 5,000 images of CIFAR-10 unseen, to choose by, and an epoch of both \
	reads 1.26 times as many images as a plain one. Here they divide all images, by Bootstrap(kind='split', cover=True): an epoch of both reads each \
	once, nothing is chosen, and the last epoch is kept, as that of MC dropout is, on the same seeds and test images as in \
	[images-cifar10-5k](results/images-cifar10-5k.md). By make divided DATA=DIR."

# All 50,000 images: a network of a quarter of the width for 24 epochs, about an hour.
cifar10-all: .venv/ready
	$(BIN)/twinboot images --preset cifar10-small --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# Other ways to train twins, judged by images of the training files that nothing trains on, never by test images: those
# of the first line with five seeds, those of the others with the first seed alone. About an hour.
tried: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --spare --methods twins twins-halves twins-halves-early \
		--screened twins-early dropout-seen twins-centered \
		--jobs 2 --out out/tried
	$(BIN)/twinboot report out/tried --page docs/tried.md --prefix tried- --title "Other ways to train twins" \
		--about "What was tried to make Twin-Boot better on 5,000 images of CIFAR-10. All rows are \
	judged by 5,000 other images of the training files, which nothing trained on: what is chosen is not chosen by test \
	images. On halves: twins divide what they see, by Bootstrap(n, kind='split'). Early resets: \
	resets.steps(resets.growing(10, 1.1, most=79)). On what twins see: without the images that no twin drew. Rows of the \
	first seed alone are to be compared with that seed of Twin-Boot, as the second table does. By make tried DATA=DIR."

# Twin-Boot with one thing changed at a time, and IVON, with one seed and judged as by make tried: to see what is worth
# more seeds. Half an hour.
changed: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --spare --seeds 1 --methods twins twins-quiet twins-decay \
		ivon --jobs 2 --out out/changed
	$(BIN)/twinboot report out/changed --page docs/changed.md --prefix changed- \
		--title "Twin-Boot with one thing changed" \
		--about "What else was tried to make Twin-Boot better on 5,000 images of CIFAR-10, one thing at a time, and IVON \
	with the five epochs in which its authors let the rate rise. One seed, judged by 5,000 other images of the training \
	files, which nothing trained on: a look, which decides nothing. By make changed DATA=DIR."

# Twins that pool their gradients, in several ways, judged as by make tried. Half an hour.
pooled: .venv/ready
	$(BIN)/twinboot images --preset cifar10-5k --data $(DATA) --spare --seeds 3 --methods twins twins-pooled-halves \
		twins-pooled-dropout --screened twins-pooled twins-pooled-quiet twins-pooled-loud --jobs 2 --out out/pooled
	$(BIN)/twinboot images --methods twins twins-pooled-halves --seeds 5 --jobs 2 --out out/pooled
	$(BIN)/twinboot report out/pooled --page docs/pooled.md --prefix pooled- --title "Twins that pool their gradients" \
		--about "Twins on 5,000 images of CIFAR-10 of whose gradients 0.7 is the mean of both, by fit(pooled=0.7), and \
	Twin-Boot by the defaults of fit, which pools nothing. All rows are judged by 5,000 other images of the training \
	files, which nothing trained on. With pooled gradients twins divide the images and have 4 times sigma for noise in \
	training and 2.4 times in draws for a prediction; with less noise 3 times, with more 5.5 times, with dropout 3 times \
	and dropout of 0.05. On halves: 13.5 % of the images are left unseen, to choose by. Rows of the first seed alone are \
	to be compared with that seed of Twin-Boot, as the second table does. And the same on the digits, where there are no \
	such images: look at the loss of those that are unseen. By make pooled DATA=DIR."

# The nine regression sets, as one file: make uci DATA=FILE.npz.
uci: .venv/ready
	$(BIN)/twinboot uci --data $(DATA) --jobs 2 --out out/full
	$(BIN)/twinboot report out/full --page docs/results

# The same inversion on a velocity model of your own: make marmousi MODEL=FILE.npz (m/s on a grid of 20 m).
marmousi: .venv/ready
	$(BIN)/twinboot fwi --model $(MODEL) --spacing 20 --window 10 30 90 140 --coarsen 2 --bounds 1000 4800 \
		--interval 0.0035 --duration 2.0 --receivers 34 --seeds 3 --out out/marmousi
	$(BIN)/twinboot report out/marmousi --page docs/marmousi.md --prefix marmousi- \
		--title "Marmousi: full-waveform inversion" --about "A window of the Marmousi model, a synthetic section \
	of the ground by the Institut Francais du Petrole. The model is not part of this repository: make marmousi \
	MODEL=FILE.npz reads it from a file of yours."

bench: .venv/ready
	$(BIN)/python benchmarks/overhead.py --page docs/overhead.md

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

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
