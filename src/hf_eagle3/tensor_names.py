"""The names of a checkpoint's tensors, read without any of the tensors, and whether they are a draft's."""

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from transformers.utils.hub import cached_file


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# The tensors of a layer of transformers' Qwen3.
QWEN3_LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}
# Names that only EAGLE-3's drafts have: SafeAILab's, and those of speculators' research code.
OF_EAGLE3 = ("midlayer.", "lm_head_layernorm.")
FIRST_LAYERS = ("midlayer.", "midlayer.0.", "layers.0.")
# Names of TorchSpec in block drafts.
OF_TORCHSPEC = {
    "context_norm.weight": "hidden_norm.weight",
    "context_proj.weight": "fc.weight",
    "final_norm.weight": "norm.weight",
}
WRAPPERS = r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
# Arguments of `cached_file` that make it return `None` for a missing file.
LENIENT = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}
# Arguments that also make it download nothing.
LOCAL = {**LENIENT, "local_files_only": True, "force_download": False}


def find(source: str | Path, name: str, **hub_kwargs: Any) -> Path | None:
    """Returns the path of a file in a folder or on the Hub, or `None` if it does not exist."""
    hub_kwargs = {"_raise_exceptions_for_missing_entries": False, **hub_kwargs}
    found = cached_file(str(source), name, **hub_kwargs)
    return None if found is None else Path(found)


def check_is_reachable(source: str | Path, name: str, **hub_kwargs: Any) -> None:
    """Raises `OSError` if a file that [`find`] did not find may be on the Hub, which cannot be reached (offline, no connection)."""
    try:
        cached_file(str(source), name, **hub_kwargs)
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise OSError(f"There is no folder {source}, and the Hub cannot be asked. {error}") from error.__cause__


def with_variant(name: str, variant: str | None) -> str:
    """Returns the name of a file of one of several sets of weights (`model.fp16.safetensors`)."""
    beginning, _, end = name.rpartition(".")
    return name if variant is None else f"{beginning}.{variant}.{end}"


def is_draft(names: Iterable[str]) -> bool:
    """
    Whether tensors with these names make up an EAGLE draft. A draft has a first layer that reads the token beside the
    state, or a vocabulary mapping, or (EAGLE 1 and 2, heads of multi-token prediction) layers behind an `fc`.
    """
    shorter = without_prefix(names)
    names = shorter.values()
    if any(name.startswith(OF_EAGLE3) for name in names):
        return True
    if "hidden_norm.weight" in names:  # a block draft has it outside of its layers
        return False
    if any(name.startswith(("layers.0.hidden_norm.", "layers.0.eh_proj.")) or name == "d2t" for name in names):
        return True
    # No model of transformers has an `fc` beside its `layers`, except the decoders of some audio codecs (Xcodec2, NeuCodec).
    # Those have other tensors outside of the decoder.
    outside = {name for name, short in shorter.items() if name == short} - {"lm_head.weight", "embed_tokens.weight"}
    has_layers = any(name.startswith("layers.") for name in names)
    return "fc.weight" in names and has_layers and ("fc.weight" in shorter or not outside)


def is_block_draft(names: Iterable[str]) -> bool:
    """Whether tensors with these names make up a draft like DFlash's, which fuses the target's states before its layers."""
    shorter = {OF_TORCHSPEC.get(name, name) for name in without_prefix(names).values()}
    return {"fc.weight", "hidden_norm.weight"} <= shorter and not any(name.startswith(OF_EAGLE3) for name in shorter)


def unlike_qwen3(names: Iterable[str]) -> list[str]:
    """Returns the parts of layers that only these tensors have, or only Qwen3's layers (`self_attn.q_norm.weight`)."""
    parts = (name.split(".", 2) for name in without_prefix(names).values())
    return sorted({rest[-1] for layers, *rest in parts if layers == "layers"} ^ QWEN3_LAYER)


def without_prefix(names: Iterable[str]) -> dict[str, str]:
    """
    Maps names of tensors to the names without the prefix that wrappers added (`model.`, `module.model.`).

    The prefix is what stands before `fc` or the first layer. A name that has only a part of it loses that part.
    If these two have different prefixes, they belong together if the only first layer is EAGLE-3's, and each loses its own.
    Otherwise the shortest counts: a target with a draft in training has two first layers. `torch.compile`, FSDP and activation
    checkpointing may add theirs also within names.
    """
    shorter = {name: re.sub(WRAPPERS, "", name) for name in names}

    def before(*marks: str) -> list[str]:
        found = [name[: -len(mark)] for name in shorter.values() for mark in marks if name.endswith(mark)]
        return [prefix for prefix in found if not prefix or prefix.endswith(".")]

    of_layers = before(*(f"{layer}self_attn.o_proj.weight" for layer in FIRST_LAYERS))
    prefixes = sorted({*before("fc.weight"), *of_layers}, key=len)
    of_eagle3 = tuple(prefix + mark for prefix in of_layers for mark in ("midlayer.", "layers.0.hidden_norm."))
    if len(of_layers) != 1 or not any(name.startswith(of_eagle3) for name in shorter.values()):
        prefixes = prefixes[:1]
    for part in [part for prefix in prefixes for part in prefix.split(".")[:-1]]:
        for name in shorter:
            shorter[name] = shorter[name].removeprefix(part + ".")
    return shorter


def our_names(names: Iterable[str]) -> dict[str, str]:
    """
    Maps names of a draft's tensors to ours: without a prefix, with `layers.0` for SafeAILab's `midlayer`, and without
    TorchSpec's names. Model-Optimizer numbered several midlayers (`midlayer.1`). As in vLLM and SGLang, `model.` may stand before
    some names only.
    """
    shorter = {name: short.removeprefix("model.") for name, short in without_prefix(names).items()}
    shorter = {name: OF_TORCHSPEC.get(short, short) for name, short in shorter.items()}
    numbered = {name: re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", short) for name, short in shorter.items()}
    return {name: re.sub(r"^midlayer\.", "layers.0.", short) for name, short in numbered.items()}


def weights_file(source: str | Path, variant: str | None = None, **hub_kwargs: Any) -> Path | None:
    """Returns the path of a checkpoint's weights, or of their index, or `None` if there are none."""
    paths = (find(source, with_variant(name, variant), **hub_kwargs) for name in WEIGHT_FILES)
    return next((path for path in paths if path is not None), None)


def tensor_names_on_hub(
    source: str | Path, with_weights: bool = False, variant: str | None = None, **hub_kwargs: Any
) -> list[str]:
    """
    Returns the names of a checkpoint's tensors on the Hub. Fetches only the headers and indices of its files. Pickles have no
    header, and that of another file may not be reached: these files are downloaded whole, and only `with_weights`.
    """
    for name in WEIGHT_FILES:
        is_plain, name = name == "model.safetensors", with_variant(name, variant)
        names = header_on_hub(source, name, **hub_kwargs) if is_plain else []
        if not names and (with_weights or name.endswith(".json")):
            path = find(source, name, **{**hub_kwargs, **LENIENT})
            names = [] if path is None else names_in(path)
        if names:
            return names
    return []


def names_in(path: Path) -> list[str]:
    """Returns the names of the tensors in a file or index. Empty if it cannot be read."""
    try:
        if path.suffix == ".bin":
            import torch  # here, so that `import hf_eagle3` is quick

            can_map = zipfile.is_zipfile(path)  # the format of torch 1.6 and later
            content = torch.load(path, map_location="meta", weights_only=True, mmap=can_map)
            return [name for name, value in content.items() if isinstance(value, torch.Tensor)]
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                return list(tensors.keys())
        return list(json.loads(path.read_bytes())["weight_map"])
    except Exception:  # the code that loads the weights reports a broken file
        return []


def header_on_hub(
    source: str | Path,
    name: str,
    revision: str | None = None,
    token: bool | str | None = None,
    subfolder: str | None = None,
    **hub_kwargs: Any,
) -> list[str]:
    """Returns the names of the tensors in a safetensors file on the Hub, from its header."""
    from huggingface_hub import HfApi

    name = f"{subfolder}/{name}" if subfolder else name
    try:
        metadata = HfApi().parse_safetensors_file_metadata(str(source), name, revision=revision, token=token)
    except Exception:  # the code that loads the weights reports a missing file or connection
        return []
    return list(metadata.tensors)
