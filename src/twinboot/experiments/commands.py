"""What can be asked on the command line, and what is said of a question that makes no sense."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from .. import __version__
from .._core.checks import meant
from .report import TITLE

DESCRIPTION = f"""Twin-Boot {__version__}: the paper's experiments, again.

Start with `twinboot reproduce --quick`: every experiment with few seeds, and a page that shows them all.
`twinboot --version` tells the version alone.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunExperiment:
    """Run one experiment."""

    config: Annotated[Any, tyro.conf.arg(name="")]
    out: Path = Path("out/full")
    """Directory, with --quick by default out/quick; the run goes into a folder of the experiment's name in it, and of
    its preset if that is not the usual one. A run that was stopped goes on."""
    jobs: int = 1
    """Parts that run at once, each in a process of its own."""
    quick: bool = False
    """Fewer seeds and points; the flags below then start from other defaults."""
    full: bool = False
    """All seeds and points: what is done without --quick."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run all experiments, and write the report."""

    out: Path = Path("out/full")
    """Directory for all runs and the report, with --quick by default out/quick. Runs that were stopped go on."""
    jobs: int = 1
    """Parts of an experiment that run at once, each in a process of its own."""
    quick: bool = False
    """Fewer seeds and points: under five minutes in all."""
    full: bool = False
    """All seeds and points: what is done without --quick."""
    seed: int | None = None
    """The seed of each experiment, instead of its own default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redraw:
    """Draw the figures of finished runs again, without running anything."""

    directory: tyro.conf.Positional[Path]
    """A run, or a directory of runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about all finished runs: figures, numbers, verdicts, configs."""

    directory: tyro.conf.Positional[Path]
    """A directory of runs."""
    page: Path | None = None
    """A page in Markdown to write too, such as docs/results.md; its figures go into docs/figures."""
    update: bool = False
    """Keep what the page has of other runs, which need not be in the directory."""
    prefix: str = ""
    """What the names of those figures begin with, so that two pages can have a figure of the same experiment."""
    title: str = TITLE
    """Of the pages."""
    about: str = ""
    """A paragraph for the top of the pages."""


class UsageError(Exception):
    """Flags or values that make no sense, in one sentence."""


def parse(arguments: list[str], experiments: Mapping[str, Any]) -> RunExperiment | Reproduce | Redraw | Report:
    quick = "--quick" in arguments
    if quick and "--full" in arguments:
        raise UsageError("--quick and --full exclude each other.")
    # The preset decides which defaults the other flags start from, and which the help shows.
    out = Path("out/quick" if quick else "out/full")
    commands: dict[str, Any] = {
        name: (
            RunExperiment(config=experiment.QUICK if quick else experiment.Config(), out=out),
            experiment.Config.__doc__,
        )
        for name, experiment in experiments.items()
    }
    commands["reproduce"] = Reproduce(out=out), Reproduce.__doc__
    for name, kind in (("figure", Redraw), ("report", Report)):
        commands[name] = kind(directory=tyro.MISSING), kind.__doc__
    command = next((word for word in arguments[:1] if not word.startswith("-")), None)
    if command is not None:
        if command not in commands:
            raise UsageError(f"there is no command {command!r}{meant(command, commands)} See twinboot --help.")
        commands = {command: commands[command]}  # so that a mistake is compared with the flags of this command alone
    defaults, about = ({name: pair[i] for name, pair in commands.items()} for i in range(2))
    choices: Any = tyro.extras.subcommand_type_from_defaults(defaults, about)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(  # type: ignore[no-any-return]
                choices,
                prog="twinboot",
                description=DESCRIPTION,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except ValueError as error:  # of the config itself
        raise UsageError(str(error)) from None
    except SystemExit as end:
        if end.code:
            raise UsageError(_one_line(complaint.getvalue(), command)) from None
        raise


def _one_line(box: str, command: str | None) -> str:
    """What tyro says in a box of several sections, as one line: what is wrong, and what may have been meant."""
    # The text is the only public form of tyro's errors. Newer versions have objects of them in `tyro._errors`, which by
    # its own words may change or go with any release.
    sections = re.split(r"[─-]{3,}", re.sub(r"[╭╮╰╯│]", " ", box))  # drawn with dashes where there is no UTF-8
    _, wrong, *others = (" ".join(section.split()).rstrip(".") for section in sections)
    wrong = re.sub(r"Error parsing (.*): no type matching (.*) could .*? from (.*?\]).*", r"\1 takes \2, not \3", wrong)
    if command in ("figure", "report") and wrong.startswith("Missing"):
        wrong = f"{command} needs a directory of runs, such as out/demo"
    for section in others:
        if section.startswith("Available"):
            wrong += f"; {section[0].lower()}{section[1:]}"
        elif section.startswith("Perhaps"):
            wrong += f"; perhaps you meant {' or '.join(dict.fromkeys(re.findall(r'--(?!help)[a-z-]*[a-z]', section)))}"
    return f"{wrong}. See twinboot {f'{command} ' if command else ''}--help."
