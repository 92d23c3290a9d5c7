import os
import sys
from pathlib import Path

# Before torch and numpy are imported: trials fork, and a process without other threads can do that safely.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
sys.path[0] = str(Path(__file__).parents[1])

from chaos.campaign import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
