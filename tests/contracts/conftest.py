"""Puts ``outside`` on the path, as a user's own package would be."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
