"""The neuron device as an executor's configuration describes it, and what it must find in its environment.

The Neuron runtime reads the environment when it is loaded, so everything here happens before torch is.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import structlog

from executor_svc.compile_cache import CompileCache, describe_identity
from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.fingerprint import fingerprint
from executor_svc.model_config import choose_max_model_len, read_config
from executor_svc.model_directory import list_weights
from holdback.buckets import blocks_for
from holdback.errors import ConfigError
from holdback.types import ExecutorLimits

if TYPE_CHECKING:
    from executor_svc.devices.neuron import NeuronDevice
    from executor_svc.parallel.group import RankGroup

log = structlog.get_logger(__name__)

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
NUM_CORES = "NEURON_RT_NUM_CORES"
COMPILER_FLAGS = "NEURON_CC_FLAGS"
COMPILED_FOLDER = "TORCH_NEURONX_NEFF_CACHE_DIR"
LOCK_FOLDER = "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"

CONTEXT_MULTIPLE = 128
SMALLEST_SEGMENT, LARGEST_SEGMENT = 512, 4096

# Two graphs of one model differ between generations of the hardware; on EC2 this file has the instance type.
_INSTANCE_TYPE = pathlib.Path("/sys/devices/virtual/dmi/id/product_name")
# Generations of NeuronCores, and how they are grouped, change what is compiled too.
_TARGET_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE", "NEURON_PLATFORM_TARGET_OVERRIDE")


def create_neuron_device(config: ExecutorConfig, ranks: RankGroup | None = None) -> NeuronDevice:
    """Refuses what settings, directory and machine show to be impossible, then loads the model. Raises ConfigError.

    Args:
        config: of the executor.
        ranks: those that share the model with this process, whose environment is as `prepare_neuron_ranks` gave it;
            None when it has all of the model.
    """
    if ranks is None:
        pin_cores(config, os.environ)
    cache = open_cache(config, 0 if ranks is None else ranks.rank)
    name_cache(cache.folder, os.environ, is_read_only=config.require_cached)
    from executor_svc.devices.neuron import load_neuron_device

    return load_neuron_device(config, cache, ranks)


def prepare_neuron_ranks(config: ExecutorConfig) -> list[dict[str, str]]:
    """What each rank must find in its environment before torch is loaded: its core, its place, its compile cache.

    Raises:
        ConfigError: what settings, directory and machine show to be impossible.
    """
    environments = [rank_environment(config, rank) for rank in range(config.tensor_parallel_size)]
    for rank, environment in enumerate(environments):
        if rank == 0 and COMPILED_FOLDER in os.environ:  # of a person; it is refused below
            environment[COMPILED_FOLDER] = os.environ[COMPILED_FOLDER]
        name_cache(open_cache(config, rank).folder, environment, is_read_only=config.require_cached)
    log.info("neuron_cores", cores=[environment[VISIBLE_CORES] for environment in environments])
    return environments


def open_cache(config: ExecutorConfig, rank: int) -> CompileCache:
    """The compile cache of a rank, once settings and model directory have been checked. Raises ConfigError.

    Ranks have other weights and collectives in their graphs, so that each has an identity of its own.
    """
    if config.model is None:
        raise ConfigError("model is required by the device neuron")
    model_config = read_config(config.model)
    weights = list_weights(config.model)
    max_model_len = _choose_length(config.model, model_config, config.max_model_len)
    smallest = 1 + blocks_for(max_model_len, config.block_size)
    check_neuron_limits(build_limits(config, max_model_len=max_model_len, num_blocks=config.num_blocks or smallest))
    size = config.tensor_parallel_size
    identity = describe_identity(
        backend="neuron",
        fingerprint=fingerprint(model_config, weights, config.dtype),
        dtype=config.dtype,
        max_model_len=max_model_len,
        target=_target(),
        flags=os.environ.get(COMPILER_FLAGS, "").split(),
        **({} if size == 1 else {"tensor_parallel_size": size, "rank": rank}),
    )
    return CompileCache(config.compile_cache, identity, is_required=config.require_cached)


def _choose_length(directory: pathlib.Path, model_config: dict[str, Any], wanted: int | None) -> int:
    try:
        return choose_max_model_len(model_config, wanted)
    except ConfigError:
        # Only transformers can tell whether another length would help. It loads torch, which no core is used by then.
        from executor_svc.models import choose_length

        return choose_length(directory, model_config, wanted)


def check_neuron_limits(limits: ExecutorLimits) -> None:
    """What this device asks of shapes, beyond K1 and K2. Raises ConfigError with the first that is wrong."""
    for context in limits.decode_context_length_buckets:
        if context % CONTEXT_MULTIPLE:
            is_last = context == limits.decode_context_length_buckets[-1]
            given = "max_model_len is" if is_last else "decode_context_length_buckets has"
            raise ConfigError(f"{given} {context}; allowed on the device neuron: multiples of {CONTEXT_MULTIPLE}")
    for size in limits.num_batched_tokens_buckets:
        if not SMALLEST_SEGMENT <= size <= LARGEST_SEGMENT:
            raise ConfigError(
                f"num_batched_tokens_buckets has {size}; allowed on the device neuron: [{SMALLEST_SEGMENT}, "
                f"{LARGEST_SEGMENT}]"
            )
        if size % limits.block_size:
            raise ConfigError(
                f"block_size is {limits.block_size}; allowed on the device neuron: what divides each of "
                f"num_batched_tokens_buckets, among which is {size}"
            )


def pin_cores(config: ExecutorConfig, environment: MutableMapping[str, str]) -> None:
    """Names the cores of this process to the Neuron runtime, which else takes all of the machine.

    Cores that were named before, as the device plugin of Kubernetes does, are left alone.

    Args:
        config: for `neuron_cores`.
        environment: of this process, before the runtime is loaded.

    Raises:
        ConfigError: both name cores, or it is no list of cores.
    """
    if config.neuron_cores is None:
        return
    parse_cores(config.neuron_cores)
    _check_named_once(config.neuron_cores, environment)
    environment[VISIBLE_CORES] = config.neuron_cores
    log.info("neuron_cores", cores=config.neuron_cores)


def _check_named_once(neuron_cores: str, environment: Mapping[str, str]) -> None:
    for name in (VISIBLE_CORES, NUM_CORES):
        if name in environment:
            raise ConfigError(
                f"neuron_cores is {neuron_cores!r} and {name} is {environment[name]!r}; allowed: one of them"
            )


def rank_environment(config: ExecutorConfig, rank: int) -> dict[str, str]:
    """What one rank of an executor needs in its environment on the device neuron: a core, and who it is.

    Rank r gets the r-th of the executor's cores: those of `neuron_cores`, else of NEURON_RT_VISIBLE_CORES, else 0 to
    n - 1. By LOCAL_RANK transformers and torch-neuronx number the one device that a rank has; at MASTER_ADDR the
    Neuron runtime of rank 0 waits for those of the others, on a port that they agree on.

    Args:
        config: of the executor; `tensor_parallel_size` is n.
        rank: in [0, n).

    Raises:
        ConfigError: there are fewer cores than ranks, or it is not said which.
    """
    size = config.tensor_parallel_size
    if config.neuron_cores is not None:
        _check_named_once(config.neuron_cores, os.environ)
    named = config.neuron_cores or os.environ.get(VISIBLE_CORES)
    if named is None and NUM_CORES in os.environ:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and {NUM_CORES} is {os.environ[NUM_CORES]!r}, which names no core; "
            f"allowed: {VISIBLE_CORES}, or neuron_cores"
        )
    cores = list(range(size)) if named is None else list(dict.fromkeys(parse_cores(named)))
    if len(cores) < size:
        raise ConfigError(f"tensor_parallel_size is {size}; allowed: at most {len(cores)}, the cores in {named!r}")
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    core = {VISIBLE_CORES: str(cores[rank]), NUM_CORES: "1", "MASTER_ADDR": "127.0.0.1"}
    return core | {name: str(value) for name, value in local.items()}


def parse_cores(named: str) -> list[int]:
    """`0-3,6` is 0, 1, 2, 3, 6. Raises ConfigError for anything that is no such list."""
    cores: list[int] = []
    for part in named.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise ConfigError(f"the cores {named!r} are no list such as 0-3 or 4,5")
        cores += range(int(first), int(last or first) + 1)
    return cores


def name_cache(folder: pathlib.Path, environment: MutableMapping[str, str], *, is_read_only: bool = False) -> None:
    """Has torch-neuronx keep what it compiles in a folder of our compile cache. Raises ConfigError.

    Args:
        folder: of the artifacts. Locks lie beside it, for they come and go.
        environment: of this process, before torch-neuronx is loaded.
        is_read_only: nothing may be written there; locks, which it makes all the same, then go to a folder of this
            process that ends with it.
    """
    path = str(folder / "neff")
    found = environment.get(COMPILED_FOLDER, path)
    if found != path:
        raise ConfigError(f"{COMPILED_FOLDER} is {found!r}; allowed: unset, for compile_cache decides it")
    if COMPILED_FOLDER in environment and LOCK_FOLDER in environment:
        return  # rank 0 did it for the others, and torch-neuronx is loaded
    environment[COMPILED_FOLDER] = path
    if is_read_only:
        locks = tempfile.mkdtemp(prefix="holdback-locks-")
        atexit.register(shutil.rmtree, locks, ignore_errors=True)
        environment[LOCK_FOLDER] = locks
    else:
        environment[LOCK_FOLDER] = str(folder.with_name("locks"))


def _target() -> str:
    """What the graphs are compiled for, as far as it can be told before the runtime is loaded."""
    try:
        instance_type = _INSTANCE_TYPE.read_text(encoding="utf-8").strip()
    except OSError:
        instance_type = "unknown"
    variables = [f"{name}={os.environ[name]}" for name in _TARGET_VARIABLES if name in os.environ]
    return " ".join([instance_type, *variables])
