"""Who may call: API keys from a file, and how much each of them may have running.

The file is YAML and holds digests, so that who reads it cannot call:

    keys:
      - name: search
        sha256: 4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5
        max_requests: 64
        max_streams: 16

`holdback key NAME` draws a key of 256 bits and prints its entry; for keys of that size a plain digest is enough. The
file is read again when it changes. A file that cannot be read any more leaves the keys as they were, with an error in
the log, for a slip of the pen is not to lock everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pydantic
import structlog

from holdback.config import read_yaml
from holdback.errors import ConfigError, UnauthenticatedError

log = structlog.get_logger(__name__)

MAX_KEYS = 10_000
SCHEME = "Bearer "


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
    max_requests: int | None = pydantic.Field(None, ge=1)
    max_streams: int | None = pydantic.Field(None, ge=1)


class _KeyFile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    keys: tuple[_Entry, ...] = pydantic.Field(max_length=MAX_KEYS)

    @pydantic.model_validator(mode="after")
    def _each_once(self) -> _KeyFile:
        for attribute in ("name", "sha256"):
            values = [getattr(entry, attribute) for entry in self.keys]
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{attribute} {twice} stands twice; allowed: each once")
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
        log.info("api_keys_read", num_keys=len(self._callers))

    def authenticate(self, authorization: str | None) -> Caller:
        self._read_again_if_changed()
        if authorization is None or not authorization.startswith(SCHEME):
            raise UnauthenticatedError("the header `authorization` is missing; allowed: `Bearer` and an API key")
        digest = hashlib.sha256(authorization[len(SCHEME) :].strip().encode()).digest()
        found = None
        for known, caller in self._callers.items():
            # All are compared, each in constant time: how long it takes tells nothing of any key.
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise UnauthenticatedError("the API key is not known")
        return found

    def _read_again_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = _read(self._path)
        except ConfigError as error:
            log.error("api_keys_kept", why=error.message)
        else:
            log.info("api_keys_read", num_keys=len(self._callers))


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


def _read(path: pathlib.Path) -> Mapping[bytes, Caller]:
    content: Any = read_yaml(path, "api_keys")
    try:
        entries = _KeyFile.model_validate(content).keys
    except pydantic.ValidationError as error:
        # Not pydantic's own words: they may hold what was written in place of a digest.
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        raise ConfigError(f"api_keys: {path}: {where}: {error.errors()[0]['msg']}") from None
    return {bytes.fromhex(entry.sha256): Caller(entry.name, entry.max_requests, entry.max_streams) for entry in entries}
