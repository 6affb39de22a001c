"""The group that the ranks of one executor form in `torch.distributed`, and what a device asks of it."""

from __future__ import annotations

import datetime
import os
import pathlib
import sys
from typing import Any

import structlog
import torch
import torch.distributed as dist

from executor_svc.parallel.sharding import choose_plan
from executor_svc.sampler import Sampled, Sampler
from holdback.errors import ConfigError

log = structlog.get_logger(__name__)

TIMEOUT = datetime.timedelta(minutes=30)
"""Of one collective. Long, for ranks load at their own pace; a rank that dies or hangs is found elsewhere."""


class RankGroup:
    """This process among the ranks. There is one group in a process.

    Ranks meet in a file that only this user can reach, and talk over the loopback interface alone.

    Args:
        rank: of this process, in [0, size).
        size: number of ranks.
        meeting_file: a path that does not exist yet, the same for all ranks.
    """

    def __init__(self, rank: int, size: int, meeting_file: pathlib.Path) -> None:
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        dist.init_process_group("gloo", init_method=meeting_file.as_uri(), rank=rank, world_size=size, timeout=TIMEOUT)

    def loading_arguments(self, config: Any) -> dict[str, Any]:
        """What makes `from_pretrained` read this rank's share of the weights alone, by the model's own plan.

        Args:
            config: of the model, as transformers parsed it.

        Raises:
            ConfigError: the model cannot be cut over so many ranks.
        """
        plan = choose_plan(config, self.size)
        if self.rank == 0:
            log.info("model_cut", ranks=self.size, attention=plan.attention)
        try:
            from transformers.distributed.configuration_utils import DistributedConfig

            return {"distributed_config": DistributedConfig(**plan.arguments)}
        except (ImportError, TypeError) as error:
            raise ConfigError(
                f"tensor_parallel_size is {self.size}, which this version of transformers cannot do: {error}"
            ) from error

    def num_threads(self, num_threads: int | None) -> int:
        """This rank's part of the executor's threads; None is as many as torch would take for itself."""
        return max(1, (num_threads or torch.get_num_threads()) // self.size)

    def agree(self, number: int | None) -> int:
        """Rank 0's number, on every rank; the others give None."""
        told = torch.tensor([0 if number is None else number])
        dist.broadcast(told, src=0)
        return int(told)

    def sampler(self, *arguments: Any) -> Sampler:
        """A `Sampler`, made of the same arguments, whose tokens are rank 0's."""
        return SharedSampler(self.rank, *arguments)

    def close(self) -> None:
        dist.destroy_process_group()


class SharedSampler(Sampler):
    """Samples on rank 0 and takes part in every step on the others, which learn the tokens.

    What `start_request` refuses is refused on every rank.
    """

    def __init__(self, rank: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_first = rank == 0

    def sample(self, logits: torch.Tensor, *arguments: Any) -> Sampled:
        """As `Sampler.sample`. Log-probabilities and failed rows are told on rank 0 alone."""
        if self._is_first:
            sampled = super().sample(logits, *arguments)
        else:
            sampled = Sampled(torch.zeros(len(logits), dtype=torch.long), [])
        dist.broadcast(sampled.token_ids, src=0)
        return sampled
