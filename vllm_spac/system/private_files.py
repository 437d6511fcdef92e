"""Folders that this user alone may enter, whatever the umask is, and the rights of files in them."""

from __future__ import annotations

import os
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Creates a folder and those above it that are missing, each ``FOLDER``; leaves one that exists as it is.

    Raises:
        OSError: it cannot be created, or something else has its name.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        os.mkdir(path, FOLDER)
    except FileExistsError:  # another process was faster
        if not path.is_dir():
            raise
