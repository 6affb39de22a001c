"""docs/serving.md lists the settings as they are."""

from __future__ import annotations

import enum
import pathlib
import re

from holdback import rpc
from holdback.config import ServiceConfig
from holdback.errors import ErrorReason
from scheduler_svc.config import SchedulerServiceConfig

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def shown(default: object) -> str:
    if default is None:
        return "null"
    if default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, enum.Enum):
        return str(default.value)
    return f"{default:.15g}" if isinstance(default, float) else str(default)


def test_every_setting_stands_there_with_its_default() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.partition("## Settings")[2].splitlines() if line.startswith("| `")]
    fields = SchedulerServiceConfig.model_fields
    own = {name: shown(info.default) for name, info in fields.items() if name not in ServiceConfig.model_fields}
    assert {name.strip(" `"): default.strip() for name, default in rows} == own


def test_every_reason_that_it_names_is_one() -> None:
    text = PAGE.partition("## Settings")[0]
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text)) - {code.name for code in rpc.STATUS_CODES.values()}
    assert {"TOO_MANY_MOVES", "PEER_STALLED", "QUEUE_FULL"} <= named <= set(ErrorReason.__members__)
