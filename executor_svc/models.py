"""Models: decoder-only definitions of transformers, with weights from a directory in Hugging Face layout.

No model definition is written or changed here. A directory holds `config.json`, `*.safetensors` (with an index where
there are several) and the tokenizer files, which the executor never reads. Whatever is wrong with it is found before
the executor registers, with one sentence that says what. Nothing in it is executed or unpickled, nothing is fetched.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from executor_svc import attention
from executor_svc.fingerprint import fingerprint
from executor_svc.model_directory import list_weights, read_config, read_json, refuse
from holdback.errors import ConfigError
from holdback.types import ModelInfo

if TYPE_CHECKING:
    from executor_svc.parallel.group import RankGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        dtype: "float32" or "bfloat16"; weights are cast.
        max_model_len: lowers the model's own limit; None takes that.
        ranks: those that share the model; then this one's share alone is read. Only rank 0 takes the fingerprint.

    Raises:
        ConfigError: the directory is no model that can be run, or `max_model_len` is beyond the model's limit.
    """
    torch_dtype = parse_dtype(dtype)
    config = read_config(directory)
    model_len = _choose_max_model_len(config, max_model_len)
    weights = list_weights(directory)
    attention.register()
    with quiet_transformers():
        module = _load_module(directory, torch_dtype, attn_implementation=attention.IMPLEMENTATION, ranks=ranks)
    text_config = module.config.get_text_config(decoder=True)
    info = ModelInfo(
        fingerprint=fingerprint(config, weights, dtype) if ranks is None or ranks.rank == 0 else "",
        name=directory.resolve().name,
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=_eos_token_ids(directory, config, int(text_config.vocab_size)),
        max_model_len=model_len,
    )
    return LoadedModel(module, int(text_config.num_hidden_layers), info)


def load_plain(directory: pathlib.Path, dtype: torch.dtype) -> Any:
    """The model as transformers runs it itself. Raises ConfigError as `load_model` does."""
    read_config(directory)
    list_weights(directory)
    return _load_module(directory, dtype, attn_implementation="sdpa")


def _load_module(
    directory: pathlib.Path, dtype: torch.dtype, *, attn_implementation: str, ranks: RankGroup | None = None
) -> Any:
    shared_loading = {} if ranks is None else ranks.loading_arguments(_parsed_config(directory))
    auto_class: Any = transformers.AutoModelForCausalLM
    try:
        module, report = auto_class.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **shared_loading,
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise refuse(directory, f"holds nothing that transformers can load: {error}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            found = sorted(str(key) for key in report[problem])
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise refuse(directory, f"has weights with {problem.replace('_', ' ')}: {shown}")
    return module.eval().requires_grad_(False)


def _parsed_config(directory: pathlib.Path) -> Any:
    auto_class: Any = transformers.AutoConfig
    return auto_class.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


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


def _choose_max_model_len(config: dict[str, Any], wanted: int | None) -> int:
    text_config = config.get("text_config") or config
    limit = text_config.get("max_position_embeddings") or text_config.get("n_positions")
    if not isinstance(limit, int) or limit < 2:
        if wanted is None:
            raise ConfigError("max_model_len is not set, and config.json has no max_position_embeddings for it")
        return wanted
    limit = max(limit, _scaled_limit(text_config))
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise ConfigError(f"max_model_len is {wanted}; allowed: [2, {limit}], as the model's config.json says")
    return wanted


def _scaled_limit(text_config: dict[str, Any]) -> int:
    """What RoPE scaling stretches the trained length to, where the configuration states both; else 0."""
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    trained, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return int(trained * factor) if isinstance(trained, int) and isinstance(factor, (int, float)) else 0


def _eos_token_ids(directory: pathlib.Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Of generation_config.json, which is what `generate` goes by, else of config.json; none is allowed."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    found = generation.get("eos_token_id")
    if found is None:
        found = (config.get("text_config") or config).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ConfigError(f"eos_token_id is {token_id}; allowed: [0, {vocab_size}), the vocabulary of the model")
    return tuple(dict.fromkeys(ids))
