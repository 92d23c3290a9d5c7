"""The runs of the regression benchmark: one part for each split of each set."""

from __future__ import annotations

from functools import partial

import pandas as pd

from ..._core.seeds import derive
from ..datasets.array_files import checksum
from ..runner.experiment import Part, Tick, UnavailableError, one_thread
from .config import NEEDED, Config
from .data import Table, read, split
from .methods import METHODS, on_all, score, single, twins


def parts(config: Config) -> list[Part]:
    """The first split of each set, then the second of each, and so on."""
    found = tables(config)
    return [
        Part(f"{name} {which}", 3, partial(_run, config, name, table, which))
        for which in range(config.splits)
        for name, table in found.items()
        if which < len(table.test)
    ]


def tables(config: Config) -> dict[str, Table]:
    """The sets that the config names, from its file."""
    if config.data is None:
        raise UnavailableError(NEEDED)
    found = read(config.data)
    if checksum(config.data) != config.checksum:
        raise ValueError(f"{config.data} is not the file that the checksum belongs to: was it changed?")
    if missing := [name for name in config.sets if name not in found]:
        raise ValueError(f"{config.data} has no set {missing[0]!r}, only {', '.join(found)}.")
    return {name: found[name] for name in config.sets or found}


def _run(config: Config, name: str, table: Table, which: int, tick: Tick) -> dict[str, pd.DataFrame]:
    data, seed = split(table, which), derive(config.seed, name, which)
    with one_thread():
        found = {"single": single(config, data, seed)}
        tick()
        found["all"] = on_all(config, data, seed, found["single"].epoch)
        tick()
        found |= twins(config, data, seed)
        tick()
    rows = [
        {"set": name, "split": which, "method": method, "rows": len(data.train_x), "inputs": data.train_x.shape[1]}
        | score(found[method], data.test_y, data.scale)
        for method in METHODS
    ]
    return {"runs": pd.DataFrame(rows)}
