"""The group that the ranks of one executor form in `torch.distributed`, and what a device asks of it."""

from __future__ import annotations

import datetime
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import structlog
import torch
import torch.distributed as dist

from executor_svc.kv_cache import LayerShape
from executor_svc.model_directory import describe_error
from executor_svc.parallel.sharding import Plan, choose_plan
from executor_svc.sampler import Sampled, Sampler
from holdback.errors import ConfigError

log = structlog.get_logger(__name__)

GLOO = "gloo"
"""What ranks on the processor talk over."""

TIMEOUT = datetime.timedelta(minutes=30)
"""Of one collective. Long, for ranks load at their own pace; a rank that dies or hangs is found elsewhere."""


class RankGroup:
    """This process among the ranks. There is one group in a process.

    Ranks meet in a file that only this user can reach, and talk over the loopback interface alone.

    Args:
        rank: of this process, in [0, size).
        size: number of ranks.
        meeting_file: a path that does not exist yet, the same for all ranks.
        backends: of `torch.distributed`: gloo for what is on the processor, and that of another device beside it.

    Raises:
        ConfigError: the ranks cannot meet over `backends`.
    """

    def __init__(self, rank: int, size: int, meeting_file: pathlib.Path, backends: str = GLOO) -> None:
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        meeting = meeting_file.as_uri()
        try:
            dist.init_process_group(backends, init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
        except Exception as error:  # a backend that is not torch's own may raise anything
            raise ConfigError(
                f"tensor_parallel_size is {size}, and rank {rank} cannot meet the others over {backends}: "
                f"{describe_error(error)}"
            ) from error

    def plan(self, config: Any) -> Plan:
        """How the ranks cut a model. Raises ConfigError for one that cannot be cut over so many.

        Args:
            config: of the model, as transformers parsed it.
        """
        return choose_plan(config, self.size)

    def loading_arguments(self, config: Any) -> dict[str, Any]:
        """What makes `from_pretrained` read this rank's share of the weights alone, by the model's own plan.

        Args:
            config: of the model, as transformers parsed it.

        Raises:
            ConfigError: the model cannot be cut over so many ranks.
        """
        plan = self.plan(config)
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
        (told,) = self.tell(None if number is None else [number], 1)
        return told

    def tell(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """`count` numbers of rank 0, on every rank; the others give None."""
        told = torch.zeros(count, dtype=torch.int64) if numbers is None else torch.tensor(numbers)
        dist.broadcast(told, src=0)
        return [int(number) for number in told]

    def tell_layers(self, layers: Sequence[LayerShape] | None) -> list[LayerShape]:
        """What rank 0 found that the whole model keeps of a token, on every rank; the others give None."""
        sizes = None if layers is None else [size for layer in layers for size in (layer.num_kv_heads, layer.head_dim)]
        told = self.tell(sizes, 2 * self.agree(None if layers is None else len(layers)))
        return [LayerShape(heads, size) for heads, size in zip(told[::2], told[1::2], strict=True)]

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' numbers, on every rank."""
        found = torch.tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

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
