"""What a model says of itself, read from its files, in a fraction of the time that loading it takes."""

from __future__ import annotations

import pathlib

from executor_svc.fingerprint import fingerprint
from executor_svc.model_config import choose_max_model_len, read_config, read_eos_token_ids, text_config
from executor_svc.model_directory import list_weights
from holdback.errors import ConfigError
from holdback.types import ModelInfo


def describe_model(directory: pathlib.Path, dtype: str, max_model_len: int | None) -> ModelInfo | None:
    """What a model says of itself once loaded, from its files; None where they leave something to transformers.

    Raises:
        ConfigError: the directory is no model that can be run.
    """
    config = read_config(directory)
    vocab_size = text_config(config).get("vocab_size")
    if not isinstance(vocab_size, int):
        return None
    try:
        model_len = choose_max_model_len(config, max_model_len)
    except ConfigError:
        if max_model_len is not None:
            raise
        return None  # the model may be one that no length would help, which transformers knows
    return ModelInfo(
        fingerprint=fingerprint(config, list_weights(directory), dtype),
        name=directory.resolve().name,
        vocab_size=vocab_size,
        eos_token_ids=read_eos_token_ids(directory, config, vocab_size),
        max_model_len=model_len,
    )
