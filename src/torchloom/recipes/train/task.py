"""The model and its loss: the built-in decoder, or a local folder in Hugging Face format.

Weight files of a folder are loaded if there are any; with `config.json` alone the weights are random. The folder's
tokenizer is used if there is one, else the tokens are bytes. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchloom.errors import ConfigError
from torchloom.recipes.train.model import PRESETS, Llama
from torchloom.recipes.train.options import TrainOptions

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_DATA_ALONE = {"local_files_only": True, "trust_remote_code": False}
"""Only data is read from the folder; Python files in it are not run."""


def encode_bytes(text: bytes) -> Tensor:
    """Return the bytes themselves as token ids."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(kw_only=True)
class Task:
    """A model with all that the loop must know about it."""

    name: str
    module: nn.Module
    loss: Callable[[Callable[..., Any], Tensor], Tensor]
    """Takes the engine and a batch of (samples, `seq_len` + 1) tokens."""
    encode: Callable[[bytes], Tensor] = encode_bytes
    """Turns text into a vector of token ids."""
    unit: Literal["byte", "token"] = "byte"
    """What one token of `encode` is."""

    def __post_init__(self) -> None:
        # Sharding leaves each rank its part.
        self.num_params = sum(p.numel() for p in self.module.parameters())


def build_task(options: TrainOptions) -> Task:
    """Build the model that `--model` names, with weights that depend on the seed alone.

    Raises:
        ConfigError: the folder holds no model that can be used.
    """
    torch.manual_seed(options.seed)
    if options.model not in PRESETS:
        return _of_folder(options.model, options.seq_len)
    module = Llama(PRESETS[options.model](options.seq_len))
    return Task(name=options.model, module=module, loss=_next_token_loss)


def _of_folder(path: str, seq_len: int) -> Task:
    import transformers  # an optional package; `check_options` has seen that it is there

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(path).expanduser()
    with _explained(path, "config.json"):
        config = transformers.AutoConfig.from_pretrained(folder, **_DATA_ALONE)
        text_config = config.get_text_config()
        vocab_size = text_config.vocab_size
    longest = getattr(text_config, "max_position_embeddings", None)  # some models have no limit
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"model folder {path!r} takes at most {longest} tokens: use --seq-len {longest} or less"
        )
    with _explained(path, "the tokenizer"):
        encode, num_ids = _tokenizer(transformers, folder)
    if num_ids > vocab_size:
        raise ConfigError(
            f"model folder {path!r}: a vocabulary of {vocab_size} is too small for the "
            f"{num_ids} ids of {'its tokenizer' if encode else 'bytes'}: raise vocab_size"
        )
    with _explained(path, "the model"):
        module = _build(transformers, folder, config)
    unit = "token" if encode else "byte"
    name, encode = folder.resolve().name, encode or encode_bytes
    return Task(name=name, module=module, loss=_hf_loss, encode=encode, unit=unit)


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


def _next_token_loss(engine: Callable[..., Any], tokens: Tensor) -> Tensor:
    return engine(tokens[:, :-1], labels=tokens[:, 1:])


def _hf_loss(engine: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Hugging Face models shift the labels themselves."""
    inputs = tokens[:, :-1]
    return engine(input_ids=inputs, labels=inputs).loss


@contextmanager
def _explained(path: str, part: str) -> Iterator[None]:
    """Turn what transformers raises about a bad folder into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError) as err:
        reason = (str(err).splitlines() or [type(err).__name__])[0]
        raise ConfigError(f"model folder {path!r}: {part} cannot be used: {reason}") from err
