"""`python -m twinboot`, for where the command is not on the path."""

import sys

from .experiments.cli import main

sys.exit(main())
