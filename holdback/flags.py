"""Command lines: argparse whose mistakes are one sentence, as any other wrong setting."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from holdback.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print how the command is used and exit. Flags are not abbreviated."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    # The base has overloads for other namespaces, which nobody here uses.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        flags, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self.error(self._not_known(unknown[0], words))
        return flags

    def _not_known(self, word: str, words: list[str]) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if word.startswith("-"):
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists what is"
            return f"{word} is not known; {hint}"
        before = words[words.index(word) - 1] if words.index(word) else ""
        if isinstance(self._option_string_actions.get(before), argparse.BooleanOptionalAction):
            return f"{before} takes no value, and has {word!r}; allowed: {before}, or {_negation(before)}"
        return f"{word!r} follows no flag"


def _negation(flag: str) -> str:
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag.removeprefix("--")
