"""Models: decoder-only definitions of transformers, with weights from a directory in Hugging Face layout.

No model definition is written or changed here. A directory holds `config.json`, `model.safetensors` or an index with
its shards, and the tokenizer files, of which the executor only looks whether they fit. Whatever is wrong with it is
found before the executor registers, with one sentence that says what. Nothing in it is executed or unpickled, nothing
is fetched. Weights stay mapped to their files where the dtype is that of the files, so that executors of one machine
share them and loading needs no second copy.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import torch
import transformers

from executor_svc import attention
from executor_svc.fingerprint import fingerprint
from executor_svc.model_config import choose_max_model_len, is_unpacked_at_load, read_config, read_eos_token_ids
from executor_svc.model_directory import check_tokenizer, describe_error, list_weights, refuse
from holdback.errors import ConfigError
from holdback.types import ModelInfo

if TYPE_CHECKING:
    from executor_svc.parallel.group import RankGroup

log = structlog.get_logger()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name. Raises ConfigError for one that no device runs."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(slots=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        module: the transformers model, in evaluation mode, its attention ours.
        num_layers: decoder layers by its configuration.
        info: what the pool must agree on.
    """

    module: Any
    num_layers: int
    info: ModelInfo

    @property
    def num_weight_bytes(self) -> int:
        """Of the weights that this process holds; of a model that ranks share, its own part."""
        return sum(_own_part(parameter).nbytes for parameter in self.module.parameters())

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: attention.AttentionContext,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the model.

        Args:
            input_ids: int64 [1, T] or [B, 1].
            positions: the same.
            context: what the attention of every layer is handed.
            keep: int64, the tokens of the T to compute logits of; an empty one computes none. None computes all.

        Returns:
            float32 [tokens, vocab_size].
        """
        output = self.module(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            holdback=context,
        )
        logits: torch.Tensor = output.logits
        return logits.flatten(0, 1).float()


def load_model(
    directory: pathlib.Path, dtype: str, max_model_len: int | None = None, ranks: RankGroup | None = None
) -> LoadedModel:
    """Loads a model to run with paged attention. Whether it can is for `model_probe` to find out.

    Args:
        directory: in Hugging Face layout.
        dtype: a key of `DTYPES`; weights are cast.
        max_model_len: lowers the model's own limit; None takes that.
        ranks: those that share the model; then this one's share alone is read. Only rank 0 takes the fingerprint.

    Raises:
        ConfigError: the directory is no model that can be run, or `max_model_len` is beyond the model's limit.
    """
    started = time.perf_counter()
    torch_dtype = parse_dtype(dtype)
    config = read_config(directory)
    model_len = choose_length(directory, config, max_model_len)
    weights = list_weights(directory)
    attention.register()
    with quiet_transformers(show_bars=sys.stderr.isatty()):
        text = _load_config(directory).get_text_config(decoder=True)
        vocab_size = int(text.vocab_size)
        check_tokenizer(directory, vocab_size)
        module = _load_module(directory, torch_dtype, attn_implementation=attention.IMPLEMENTATION, ranks=ranks)
    info = ModelInfo(
        fingerprint=fingerprint(config, weights, dtype) if ranks is None or ranks.rank == 0 else "",
        name=directory.resolve().name,
        vocab_size=vocab_size,
        eos_token_ids=read_eos_token_ids(directory, config, vocab_size),
        max_model_len=model_len,
    )
    model = LoadedModel(module, int(text.num_hidden_layers), info)
    sizes = {"bytes": model.num_weight_bytes, "seconds": round(time.perf_counter() - started, 2)}
    log.info("model_loaded", model=info.name, kind=type(module).__name__, dtype=dtype, **sizes)
    return model


def choose_length(directory: pathlib.Path, config: dict[str, Any], wanted: int | None) -> int:
    """As `choose_max_model_len`; a model that no length would help is refused for that."""
    try:
        return choose_max_model_len(config, wanted)
    except ConfigError:
        mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        found = mapping[type(_load_config(directory))]
        kinds = found if isinstance(found, (tuple, list)) else (found,)
        if not any(getattr(kind, "_supports_attention_backend", False) for kind in kinds):
            raise refuse(directory, "is a model whose attention cannot be replaced by paged attention") from None
        raise


def load_plain(directory: pathlib.Path, dtype: torch.dtype) -> Any:
    """The model as transformers runs it itself. Raises ConfigError as `load_model` does."""
    read_config(directory)
    list_weights(directory)
    return _load_module(directory, dtype, attn_implementation="sdpa")


def _load_module(
    directory: pathlib.Path, dtype: torch.dtype, *, attn_implementation: str, ranks: RankGroup | None = None
) -> Any:
    library: Any = transformers
    config = _load_config(directory)
    arguments = {} if ranks is None else ranks.loading_arguments(config)
    if is_unpacked_at_load(read_config(directory)):
        arguments["quantization_config"] = library.Mxfp4Config(dequantize=True)
    with _refusing_what_transformers_raises(directory):
        module, report = library.AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # all the same they are refused, below, by name
            **arguments,
        )
    for name, found, wanted in sorted(report["mismatched_keys"]):
        allowed = f"{list(wanted)}, as config.json says"
        raise refuse(directory, f"has the weight {name} of shape {list(found)}; allowed: {allowed}")
    for problem in ("missing_keys", "unexpected_keys"):
        if report[problem]:
            found = sorted(str(key) for key in report[problem])
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise refuse(directory, f"has weights with {problem.replace('_', ' ')}: {shown}")
    _check_finite(directory, module, dtype)
    return module.eval().requires_grad_(False)


def _load_config(directory: pathlib.Path) -> Any:
    """The configuration, of a model that generates text and is the one that its weights were written by."""
    raw = read_config(directory)
    kind, written_by = raw["model_type"], raw["architectures"]
    if kind not in transformers.CONFIG_MAPPING:
        own_code = "; its own code (auto_map) is never run" if raw.get("auto_map") else ""
        raise refuse(directory, f"is of model_type {kind!r}, which transformers does not know{own_code}")
    with _refusing_what_transformers_raises(directory):
        config: Any = transformers.AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping.get(type(config), ())
    names = [one.__name__ for one in (found if isinstance(found, (tuple, list)) else (found,))]
    if not names:
        raise refuse(directory, f"is of model_type {kind!r}, of which transformers has no model that generates text")
    if not set(names) & set(written_by):
        raise refuse(
            directory, f"has architectures {written_by} but model_type {kind!r}, which is {' or '.join(names)}"
        )
    return config


@contextlib.contextmanager
def _refusing_what_transformers_raises(directory: pathlib.Path) -> Iterator[None]:
    """A broken configuration makes it raise anything at all, from ZeroDivisionError to errors of its own validation."""
    try:
        yield
    except Exception as error:
        if attention.IMPLEMENTATION in str(error):
            raise refuse(directory, "is a model whose attention cannot be replaced by paged attention") from error
        raise refuse(directory, f"holds nothing that transformers can load: {describe_error(error)}") from error


@torch.no_grad()
def _check_finite(directory: pathlib.Path, module: Any, dtype: torch.dtype) -> None:
    """One pass over the weights in memory; where they are mapped it is the one that reads them from the disk."""
    seen: set[int] = set()
    for name, weight in module.state_dict(keep_vars=True).items():
        tensor = _own_part(weight)
        if not tensor.is_floating_point() or tensor.data_ptr() in seen or tensor.numel() == 0:
            continue
        seen.add(tensor.data_ptr())
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.cpu())):
            raise refuse(directory, f"has the weight {name} with NaN or infinite numbers in {dtype}")


def _own_part(weight: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a weight that ranks share, which is a DTensor; any other as it is."""
    found: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return found


@contextlib.contextmanager
def quiet_transformers(*, show_bars: bool = False) -> Iterator[None]:
    """Errors alone, and its progress bars only where they are wanted: what it would warn of is checked here."""
    logging: Any = transformers.logging
    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.ERROR)
    (logging.enable_progress_bar if show_bars else logging.disable_progress_bar)()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        (logging.enable_progress_bar if had_bars else logging.disable_progress_bar)()
