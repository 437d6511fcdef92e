"""Lock of one folder of packed experts: one process packs at a time, and none deletes what another uses."""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path
from typing import TextIO

from vllm_spac.errors import StoreError

logger = logging.getLogger("vllm.spac")

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class StoreLock:
    """A file lock next to the packed experts: exclusive while a process packs, shared while processes use them.

    Args:
        folder: of all packed experts; created if it does not exist.
        name: fingerprint of the experts.

    Raises:
        StoreError: the folder cannot be written to, and is not read-only either.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._file = _open(folder, name)
        if self._file is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("spac: another process packs or uses these experts in %s; sharing them with it", folder)
            fcntl.flock(self._file, fcntl.LOCK_SH)  # waits until it has packed

    def claim(self, missing: int) -> bool:
        """Takes the lock exclusively for packing if possible.

        Otherwise this process packs while servers use the other experts, which is safe: files are replaced atomically.

        Args:
            missing: experts to be packed.

        Returns:
            Whether experts are missing and no other process uses the folder.
        """
        if not missing or self._file is None:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("spac: %d packed experts are missing or damaged; packing them next to a server", missing)
            fcntl.flock(self._file, fcntl.LOCK_SH)  # the failed attempt released it
            return False
        return True

    def share(self) -> None:
        """Lets other processes use the experts: all are packed."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()


def _open(folder: Path, name: str) -> TextIO | None:
    """Returns the lock file; one that exists if the folder cannot be written to, else None."""
    path = folder / f"{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(path, "w")
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise StoreError(
                f"spac: cannot write {path}: {error.strerror}; name another folder with --spac-disk-dir DIR"
            ) from error
        try:
            return open(path)
        except OSError:
            logger.warning(
                "spac: %s cannot be written to (%s), so its experts are used without a lock: another process may "
                "delete them while they are in use",
                folder,
                error.strerror,
            )
            return None
