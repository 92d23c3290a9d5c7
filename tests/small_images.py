"""A short run of the image experiment on the digits, and tables made of its own."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from twinboot.experiments import images
from twinboot.experiments.images import Config
from twinboot.experiments.runner.store import Run, carry_out

SMALL = Config(methods=("hold-out", "twins", "twins-draws"), epochs=2, seeds=2, samples=2)


@cache
def small() -> Run:
    with TemporaryDirectory() as directory:
        return carry_out("images", images, SMALL, Path(directory) / "images")


def with_values(row: str, **columns: float | tuple[float, float]) -> dict[str, pd.DataFrame]:
    """The tables of the small run, but for these values of a row: one for both seeds, or one for each."""
    run = small()
    rows = run.tables["rows"].copy()
    for column, values in columns.items():
        rows.loc[rows["row"] == row, column] = values
    return {**run.tables, "rows": rows}


def repeated(times: int) -> dict[str, pd.DataFrame]:
    """The tables of the small run, as if it had so many times as many seeds."""
    tables = {
        name: pd.concat([table.assign(seed=table["seed"] + 2 * k) for k in range(times)], ignore_index=True)
        for name, table in small().tables.items()
        if "seed" in table
    }
    return {**tables, "turns": small().tables["turns"]}
