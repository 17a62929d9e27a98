"""The default model as a folder in the format of transformers, for engines that read no GGUF."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from indexer.tokenizer import DEFAULT_MODEL, load_tokenizer, locate_model

_OF_THE_FILE = {"_name_or_path", "architectures", "quantization_config", "transformers_version"}


def save_smollm2(folder: Path) -> Path:
    """Write SmolLM2-135M-Instruct, dequantised to float32, with its tokenizer."""
    files = locate_model(DEFAULT_MODEL)
    options: Any = {"dtype": "float32", **files.options()}
    loaded = AutoModelForCausalLM.from_pretrained(files.location, **options)
    settings = {
        name: value for name, value in loaded.config.to_dict().items() if name not in _OF_THE_FILE
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))  # what was read of GGUF refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    load_tokenizer(DEFAULT_MODEL).save_pretrained(folder)
    return folder
