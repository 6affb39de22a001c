"""Directories of compiled code: whoever can write to one decides what this process runs.

So a directory is used only if it belongs to this user, or to root, and nobody else can write to it. One that is made
here is this user's alone.
"""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile


class CacheDirectoryError(Exception):
    """Why a directory cannot be used, as the end of a sentence: `is a file; allowed: a directory`."""


def user_directory(name: str) -> pathlib.Path:
    """`holdback/NAME` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "holdback" / name


def prepare_directory(directory: pathlib.Path, *, is_read_only: bool = False) -> None:
    """Makes a directory where there is none, and checks that it can be trusted and written to.

    Args:
        directory: its parents are made too.
        is_read_only: it must exist, and need not be writable.

    Raises:
        CacheDirectoryError: it cannot be used.
    """
    try:
        if not is_read_only:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except FileExistsError:
        raise CacheDirectoryError("is a file; allowed: a directory") from None
    except OSError as error:
        raise CacheDirectoryError(f"cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise CacheDirectoryError("is a file; allowed: a directory")
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise CacheDirectoryError("can be written to by others, and what is in it would be run")
    if not is_read_only:
        _check_writable(directory)


def _check_writable(directory: pathlib.Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"-")
    except OSError as error:
        raise CacheDirectoryError(f"cannot be written to: {error.strerror}") from None


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file at once, so that another process finds all of it or nothing. Raises OSError."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        pathlib.Path(name).replace(path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
