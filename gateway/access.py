"""Who may call: API keys from a file, and how much each of them may have running.

The file is YAML and holds digests, so that who reads it cannot call:

    keys:
      - name: search
        sha256: 4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5
        max_requests: 64
        max_streams: 16

`holdback key NAME` draws a key of 256 bits and prints its entry; for keys of that size a plain digest is enough. The
file is read again when it changes, beside the calls: those that come meanwhile meet the keys from before. A file that
cannot be read any more leaves the keys as they were, with an error in the log, for a slip of the pen is not to lock
everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pydantic
import structlog

from holdback.config import read_yaml
from holdback.errors import ConfigError, UnauthenticatedError

log = structlog.get_logger(__name__)

MAX_KEYS = 10_000
SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        name: of the key; empty where no keys are asked for.
        max_requests: generations that may run at once; None without limit.
        max_streams: of those, streams.
    """

    name: str = ""
    max_requests: int | None = None
    max_streams: int | None = None


ANYONE = Caller()
_NOBODY = (b"", ANYONE)  # no digest is empty


class Access(Protocol):
    """Says who a call is from."""

    def authenticate(self, authorization: str | None) -> Caller:
        """Args: authorization: the header of that name. Raises UnauthenticatedError."""


class OpenAccess:
    """Everybody may call."""

    def authenticate(self, authorization: str | None) -> Caller:
        return ANYONE


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field(min_length=1, max_length=128)
    sha256: str = pydantic.Field(pattern="^[0-9a-f]{64}$")
    max_requests: int | None = pydantic.Field(None, ge=1, strict=True)  # `yes` is no number
    max_streams: int | None = pydantic.Field(None, ge=1, strict=True)


class _KeyFile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    keys: tuple[_Entry, ...] = pydantic.Field(max_length=MAX_KEYS)

    @pydantic.model_validator(mode="after")
    def _each_once(self) -> _KeyFile:
        for attribute in ("name", "sha256"):
            seen: set[str] = set()
            for value in (getattr(entry, attribute) for entry in self.keys):
                if value in seen:
                    raise ValueError(f"{attribute} {value} stands twice; allowed: each once")
                seen.add(value)
        return self


class KeyAccess:
    """Callers with a key of the file.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._callers = _read(path)
        self._reading: threading.Thread | None = None
        log.info("api_keys_read", num_keys=len(self._callers))

    def authenticate(self, authorization: str | None) -> Caller:
        self._read_again_if_changed()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME:
            raise UnauthenticatedError("the header `authorization` is missing; allowed: `Bearer` and an API key")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # The search is of digests, and nobody can choose what a digest begins with: how long it takes tells nothing
        # that leads to a key. Whether the one found is the right one is then asked in constant time.
        known, caller = self._callers.get(digest, _NOBODY)
        if not hmac.compare_digest(known, digest):
            raise UnauthenticatedError("the API key is not known")
        return caller

    def wait_until_read(self) -> None:
        """Returns when the file as it was at the last call is in effect."""
        if self._reading is not None:
            self._reading.join()

    def _read_again_if_changed(self) -> None:
        if self._reading is not None and self._reading.is_alive():
            return
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._reading = threading.Thread(target=self._read_again, name="api-keys", daemon=True)
        self._reading.start()

    def _read_again(self) -> None:
        try:
            self._callers = _read(self._path)
        except ConfigError as error:
            log.error("api_keys_kept", why=error.message)
        else:
            log.info("api_keys_read", num_keys=len(self._callers))


_NEEDED = {"model_type": "a mapping is needed", "tuple_type": "a list is needed"}


def create_access(path: pathlib.Path | None) -> Access:
    """Raises ConfigError for a file that is none."""
    return OpenAccess() if path is None else KeyAccess(path)


def _stamp(path: pathlib.Path) -> tuple[int, int, int] | None:
    """Changes with the file; None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: pathlib.Path) -> Mapping[bytes, tuple[bytes, Caller]]:
    """Callers, each with its digest, by that digest."""
    content: Any = read_yaml(path, "api_keys")
    try:
        entries = _KeyFile.model_validate(content).keys
    except pydantic.ValidationError as error:
        # Not pydantic's own words: they may hold what was written in place of a digest.
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        problem = error.errors()[0]
        why = _NEEDED.get(problem["type"], problem["msg"])
        raise ConfigError(f"api_keys: {path}: {where}: {why}") from None
    digests = [bytes.fromhex(entry.sha256) for entry in entries]
    callers = [Caller(entry.name, entry.max_requests, entry.max_streams) for entry in entries]
    return {digest: (digest, caller) for digest, caller in zip(digests, callers, strict=True)}
