"""What a checkpoint holds: the names of its tensors, without reading any of them."""

import json
import zipfile
from pathlib import Path

from transformers.utils.hub import cached_file


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# A file without any of these is none of a draft, which saves parsing the long headers and indices of other models.
TRACES = (b"fc.weight", b"midlayer.", b"hidden_norm.weight", b"d2t")
# As `cached_file` takes them: what is not there is no error.
LENIENT = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}


def find(source, name: str, **hub_kwargs) -> Path | None:
    """The path of a file in a folder or on the Hub, or `None`."""
    hub_kwargs = {"_raise_exceptions_for_missing_entries": False, **hub_kwargs}
    found = cached_file(str(source), name, **hub_kwargs)
    return None if found is None else Path(found)


def is_draft(names) -> bool:
    """
    Whether tensors of these names are those of an EAGLE draft: one with a first layer that reads the token beside the
    state, or whose vocabulary is mapped, or a single layer behind an `fc` (EAGLE 1 and 2).
    """
    names = without_prefix(names).values()
    if "hidden_norm.weight" in names:  # beside the layers
        return False
    if any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) or name == "d2t" for name in names):
        return True
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    return "fc.weight" in names and layers == {"0"}


def is_block_draft(names) -> bool:
    """Whether tensors of these names are those of a draft like DFlash's, which reads fused states beside its layers."""
    return {"fc.weight", "hidden_norm.weight"} <= set(names)


def without_prefix(names) -> dict[str, str]:
    """
    Names of tensors, and what they are without what wrappers put before them: that which `fc` or the first layer has
    (`model.`, `module.model.`), or as much of it as a name has.
    """
    marks = ("fc.weight", "midlayer.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.weight")
    prefixes = [name[: -len(mark)] for name in names for mark in marks if name.endswith(mark)]
    prefixes = [prefix for prefix in prefixes if not prefix or prefix.endswith(".")]
    parts, shorter = min(prefixes, key=len, default="").split(".")[:-1], {}
    for name in names:
        shorter[name] = name
        for part in parts:
            shorter[name] = shorter[name].removeprefix(part + ".")
    return shorter


def tensor_names(source, **hub_kwargs) -> list[str] | None:
    """
    The names of a checkpoint's tensors on this machine, as far as they may be those of a draft: those of other models, and of
    files that cannot be read, are left out. `None` if no weights are there.

    Args:
        source (`str` or `Path`): Folder or Hub id.
        hub_kwargs (*optional*): `revision`, `cache_dir`, `token` and the like.
    """
    local = {**hub_kwargs, **LENIENT, "local_files_only": True, "force_download": False}
    paths = (find(source, name, **local) for name in WEIGHT_FILES)
    path = next((path for path in paths if path is not None), None)
    return None if path is None else names_in(path)


def tensor_names_on_hub(source, with_pickles: bool = False, **hub_kwargs) -> list[str]:
    """
    Likewise of a checkpoint on the Hub, of which the headers are fetched.

    Args:
        with_pickles (`bool`, *optional*, defaults to `False`):
            Whether pickles are downloaded, which have no header.
    """
    for name in WEIGHT_FILES:
        if name == "model.safetensors":
            names = header_on_hub(source, name, **hub_kwargs)
        elif name.endswith(".json") or with_pickles:
            path = find(source, name, **{**hub_kwargs, **LENIENT})
            names = [] if path is None else names_in(path)
        else:
            continue
        if names:
            return names
    return []


def names_in(path: Path) -> list[str]:
    try:
        if path.suffix == ".bin":
            import torch  # here, so that `import hf_eagle3` is quick

            can_map = zipfile.is_zipfile(path)  # since torch 1.6
            return list(torch.load(path, map_location="meta", weights_only=True, mmap=can_map))
        with open(path, "rb") as file:
            if path.suffix == ".safetensors":
                size = int.from_bytes(file.read(8), "little")
                content = file.read(min(size, path.stat().st_size))
            else:
                content = file.read()
        if not any(trace in content for trace in TRACES):
            return []
        names = json.loads(content)
        return list(names["weight_map"] if path.suffix == ".json" else names)
    except Exception:  # a file that is broken, or of another kind: whoever loads it says so
        return []


def header_on_hub(source, name: str, revision=None, token=None, subfolder=None, **hub_kwargs) -> list[str]:
    """From a header on the Hub, of which only the beginning is fetched."""
    from huggingface_hub import HfApi

    name = f"{subfolder}/{name}" if subfolder else name
    try:
        metadata = HfApi().parse_safetensors_file_metadata(str(source), name, revision=revision, token=token)
    except Exception:  # no such file, or no connection: whoever loads it says so
        return []
    return list(metadata.tensors)
