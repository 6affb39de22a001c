"""The control groups that this process runs in, whose limits may be below what the machine has."""

from __future__ import annotations

import pathlib


def find_control_groups(controller: str, root: pathlib.Path) -> list[pathlib.Path]:
    """Folders of this process's group and of each group around it, in both versions of control groups.

    Args:
        controller: "memory" or "cpu".
        root: of the file system, another one in tests.
    """
    found = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        # Inside a container the path may be that of the machine, which is not there; the group is then the top.
        group = base / path.strip("/")
        while True:
            found.append(group)
            if group == base or base not in group.parents:
                break
            group = group.parent
    return found


def read_text(path: pathlib.Path) -> str:
    """What a file says; nothing when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
