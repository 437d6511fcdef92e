"""Puts this folder on the path of its own tests, for the modules that they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
