"""A device of several ranks, as rank 0 has it: its own device, and the others told of every call before it counts.

The contract of `devices.base` holds because each rank runs the same calls in the same order, and because what a rank
gets to know of a step is sent when the step is launched here, not when it runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor_svc.devices import create_local_device, load_collectives, prepare_ranks
from executor_svc.devices.base import Device, GraphKey, StepInputs, StepResult
from executor_svc.parallel.messages import Frame, RequestTable
from executor_svc.parallel.processes import RankProcesses
from holdback.errors import HoldbackError
from holdback.types import RequestSpec

if TYPE_CHECKING:
    from executor_svc.config import ExecutorConfig


def create_parallel_device(config: ExecutorConfig) -> ParallelDevice:
    """Starts the other ranks, loads this one's share beside theirs, and waits for all. Raises ConfigError."""
    environments = prepare_ranks(config)
    ranks = RankProcesses(config, environments.__getitem__)
    os.environ.update(environments[0])
    with contextlib.ExitStack() as leaving:
        try:
            device = _join(config, ranks, leaving)
            ranks.wait_for("ready")
            ranks.serve()
        except BaseException:
            ranks.close()
            raise
        leaving.pop_all()
    return device


def _join(config: ExecutorConfig, ranks: RankProcesses, leaving: contextlib.ExitStack) -> ParallelDevice:
    """Rank 0's part. What fails because another rank has ended is told as that.

    Args:
        leaving: leaves the group, once there is one.
    """
    from executor_svc.parallel.group import RankGroup  # loads torch, while the other ranks load it

    backends = load_collectives(config)
    ranks.wait_for("joining")
    try:
        group = RankGroup(0, config.tensor_parallel_size, ranks.meeting_file, backends)
        leaving.callback(group.close)
        return ParallelDevice(create_local_device(config, group), ranks, group.close)
    except HoldbackError:
        raise
    except Exception as error:
        ranks.raise_cause(error)


class ParallelDevice(Device):
    """Rank 0's device and the ranks that follow it.

    Args:
        local: rank 0's own, in the group of the ranks.
        ranks: the others, loaded.
        leave: leaves the group.
    """

    def __init__(self, local: Device, ranks: RankProcesses, leave: Callable[[], None]) -> None:
        self.kind = local.kind
        self.model = local.model
        self.limits = local.limits
        self.kernels = local.kernels
        self.compile_cache = local.compile_cache
        self.compiled = local.compiled
        self.num_weight_bytes = local.num_weight_bytes
        self._local = local
        self._ranks = ranks
        self._leave = leave
        self._requests = RequestTable()

    def declared_graphs(self) -> list[GraphKey]:
        return self._local.declared_graphs()

    def start_request(self, slot: int, spec: RequestSpec) -> None:
        self._local.start_request(slot, spec)
        self._ranks.send(self._requests.encode_start(slot, spec))

    def launch(self, inputs: StepInputs) -> object:
        ticket = self._local.launch(inputs)  # first, for what it refuses no rank may be told
        self._ranks.send(self._requests.encode_step(inputs, self.limits.block_size))
        return ticket

    def collect(self, ticket: object) -> StepResult:
        """As the interface says. An error other than of a request ends the process: see `RankProcesses.fail`."""
        try:
            return self._local.collect(ticket)
        except HoldbackError:
            raise
        except Exception as error:
            self._ranks.fail(error)

    def reset(self) -> None:
        self._local.reset()
        self._requests.clear()
        self._ranks.send(Frame("reset"))

    def describe_wait(self) -> str:
        return self._ranks.describe()

    def close(self) -> None:
        self._ranks.close()
        self._local.close()
        self._leave()
