"""A local Hugging Face folder as a model to train.

Weight files are loaded if there are any; with `config.json` alone the weights are random. The folder's
tokenizer is used if there is one, else the tokens are bytes. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.errors import ConfigError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_DATA_ALONE = {"local_files_only": True, "trust_remote_code": False}
"""Only data is read from the folder; Python files in it are not run."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What a folder gave: the model and, if it has one, its tokenizer."""

    module: nn.Module
    encode: Callable[[bytes], Tensor] | None
    num_layers: int
    width: int
    is_tied: bool


def load_folder(path: str, *, seq_len: int) -> Folder:
    """Build the causal language model of a folder.

    Raises:
        ConfigError: the folder does not fit the run.
    """
    import transformers  # an optional package; `preflight` has seen that it is there

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(path).expanduser()
    with _explained(path, "config.json"):
        config = transformers.AutoConfig.from_pretrained(folder, **_DATA_ALONE)
        text_config = config.get_text_config()
        num_layers, width = text_config.num_hidden_layers, text_config.hidden_size
        vocab_size = text_config.vocab_size
    _check_length(path, text_config, seq_len)
    with _explained(path, "the tokenizer"):
        encode, num_ids = _tokenizer(transformers, folder)
    if num_ids > vocab_size:
        raise ConfigError(
            f"model folder {path!r}: a vocabulary of {vocab_size} is too small for the "
            f"{num_ids} ids of {'its tokenizer' if encode else 'bytes'}: raise vocab_size"
        )
    with _explained(path, "the model"):
        module = _build(transformers, folder, config)
    return Folder(
        module=module,
        encode=encode,
        num_layers=num_layers,
        width=width,
        is_tied=bool(config.tie_word_embeddings),
    )


def _check_length(path: str, config: Any, seq_len: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)  # some models have no limit
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"model folder {path!r} takes at most {longest} tokens: use --seq-len {longest} or less"
        )


def _build(transformers: Any, folder: Path, config: Any) -> nn.Module:
    auto = transformers.AutoModelForCausalLM
    config.use_cache = False
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        module = auto.from_pretrained(
            folder, config=config, dtype=torch.float32, weights_only=True, **_DATA_ALONE
        )
    else:
        module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return module.train()


def _tokenizer(transformers: Any, folder: Path) -> tuple[Callable[[bytes], Tensor] | None, int]:
    """Return the encoder, or `None` for bytes, and how many ids it may yield."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None, 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_DATA_ALONE)

    def encode(text: bytes) -> Tensor:
        # Line by line in one batch: fast tokenizers use all cores, and no line is too long.
        lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
        ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([token for line in ids for token in line], dtype=torch.int32)

    return encode, len(tokenizer)


@contextmanager
def _explained(path: str, part: str) -> Iterator[None]:
    """Turn what transformers raises about a bad folder into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError) as err:
        reason = (str(err).splitlines() or [type(err).__name__])[0]
        raise ConfigError(f"model folder {path!r}: {part} cannot be used: {reason}") from err
