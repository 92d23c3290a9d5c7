"""A robustness campaign: kills, corrupted files, full disks and bad inputs, many of each, and what became of them.

.venv/bin/python benchmarks/chaos --page docs/chaos.md        (make chaos)

trials.py      what a trial is, a child process for it, and the verdict on an exception
inputs.py      bad arguments to every public function; pool.py has the values, as a caller's own code
corrupt.py     damaged estimates, checkpoints and runs
kills.py       processes that are killed at a random instant, and resumed
disk.py        writes that fail half-way
campaign.py    the command: all trials side by side, the record of them, the tables and the page
"""
