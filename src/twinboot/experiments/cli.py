"""The command `twinboot`: the version, the exit codes, and what to install if a package is missing.

Exit codes: 0 done, 1 a problem with files, 2 wrong flags or values, 130 stopped with Ctrl-C. The commands are in
commands.py, which imports much: only if there is one to carry out.
"""

from __future__ import annotations

import io
import os
import shlex
import sys

from .. import __version__
from .._core.extras import how_to_install


def main(arguments: list[str] | None = None) -> int:
    """Carry out a command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    code = 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # without UTF-8, lose a sign rather than the result
    try:
        if arguments == ["--version"]:
            print(f"twinboot {__version__}")
        else:
            try:
                from . import commands
            except ImportError as error:
                why = f"the command line needs more packages ({error}): {how_to_install('cli')}"
                raise SystemExit(f"twinboot: {why}") from None
            code = commands.main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as in `twinboot gaussian | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        told = f"{error.filename or 'output'}: {error.strerror}." if error.strerror else error
        print(f"twinboot: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = shlex.join(["twinboot", *arguments])
        print(f"twinboot: stopped; finished parts are stored. To resume, repeat the command: {again}", file=sys.stderr)
        return 130
    return code
