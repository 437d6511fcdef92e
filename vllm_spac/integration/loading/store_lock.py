"""Lock of one folder of packed experts: one process packs at a time, and none deletes what another uses."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from vllm_spac.errors import StoreError
from vllm_spac.system import files
from vllm_spac.system.files import LockFile, prepare_folder

logger = logging.getLogger("vllm.spac")

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class StoreLock:
    """A file lock next to the packed experts: exclusive while a process packs, shared while processes use them.

    Args:
        folder: of all packed experts; created if it does not exist, for this user alone.
        name: fingerprint of the experts.

    Raises:
        StoreError: the folder cannot be written to, and is not read-only either; or another user may write to it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._file = _open(folder, name)
        if self._file is None or self._file.take():
            return
        if self._file.share(wait=False):
            logger.info("spac: another process uses these experts in %s; sharing them with it", folder)
            return
        logger.warning(
            "spac: waiting for %s to pack these experts; this start goes on when that is done or ended",
            self._file.holder_text(),
        )
        self._file.share()

    def claim(self, missing: int) -> bool:
        """Takes the lock exclusively for packing if possible.

        Otherwise this process packs while servers use the other experts, which is safe: files are replaced atomically.

        Returns:
            Whether experts are missing and no other process uses the folder.
        """
        if not missing or self._file is None:
            return False
        if not self._file.take():
            logger.warning("spac: %d packed experts are missing or damaged; packing them next to a server", missing)
            self._file.share()  # the failed attempt released it
            return False
        return True

    def open(self) -> None:
        """Lets other processes use the experts: all are packed."""
        if self._file is not None:
            self._file.share()

    def close(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(folder: Path, name: str) -> LockFile | None:
    """Returns the lock file; one that exists if the folder cannot be written to, else None."""
    path = folder / f"{name}.lock"
    try:
        prepare_folder(folder)
        if problem := files.refusal(path):
            raise StoreError(f"spac: {problem}, or name another folder with --spac-disk-dir DIR")
        return LockFile(path)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise StoreError(
                f"spac: cannot write {path}: {error.strerror}; name another folder with --spac-disk-dir DIR"
            ) from error
        try:
            return LockFile(path, read_only=True)
        except OSError:
            logger.warning(
                "spac: %s cannot be written to (%s), so its experts are used without a lock: another process may "
                "delete them while they are in use",
                folder,
                error.strerror,
            )
            return None
