"""Puts the modules that these tests share on the path: of this folder, and what compiles without a GPU."""

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parents[1] / "benchmarks" / "kernels")]
