"""Reading and writing the files of a checkpoint, in a folder or on the Hub."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import save_file
from torch.nn import Parameter
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from ..auto import kind_of_draft
from ..environment import public_name
from ..file_checks import read_file, read_index, read_json
from ..remote_code.auto_eagle3 import logger
from ..remote_code.configuration_eagle3 import DRAFT_KEYS
from ..remote_code.target_eagle3 import FLOATS
from ..tensor_names import WEIGHT_FILES, check_is_reachable, find, weights_file, with_variant


if TYPE_CHECKING:
    from ..remote_code.draft_model_eagle3 import DraftModel

# Code files of earlier versions, as `slots_eagle3.py`.
EARLIER_CODE = (
    *("checks", "cuda", "draft", "embedding", "estimates", "generation", "layers"),
    *("loading", "noise", "proposer", "ragged", "slots", "static"),
)


def read_tensors(source: str | Path, variant: str | None = None, **hub_kwargs: Any) -> dict[str, torch.Tensor]:
    """
    Returns all tensors of a checkpoint, from one file or several.

    Raises:
        FileNotFoundError: if there are no weights, or a file is missing.
        OSError: if a file is not in the cache, and the Hub cannot be reached.
        ValueError: if a file is cut off, holds something other than tensors, or names files outside of its folder.
    """
    path = weights_file(source, variant, **hub_kwargs)
    if path is None:
        names = [with_variant(name, variant) for name in WEIGHT_FILES]
        check_is_reachable(source, names[0], **hub_kwargs)
        raise FileNotFoundError(
            f"{source} has no weights: none of {', '.join(names)}. If they are in a file of another name, download and rename it."
        )
    if path.suffix != ".json":
        return read_file(path)
    index, tensors = read_index(path), dict[str, torch.Tensor]()
    for part in sorted(set(index.values())):
        if (part_path := find(source, part, **hub_kwargs)) is None:
            check_is_reachable(source, part, **hub_kwargs)
            raise FileNotFoundError(f"{source}: {path.name} lists {part}, which does not exist. Download it again.")
        tensors |= read_file(part_path)
    if absent := sorted(index.keys() - tensors.keys()):
        raise ValueError(f"{source}: {path.name} lists tensors that its files do not hold: {absent}.")
    return tensors


def check_new_folder(folder: str | Path) -> None:
    """Raises `ValueError` if a folder is not empty."""
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")


def check_no_other_model(
    place: str | Path,
    names: Collection[str],
    fetch: Callable[[str], str | Path],
    is_adapter: bool = False,
    **hub_kwargs: Any,
) -> None:
    """
    Checks that a draft may be saved to a folder or repo that has files with these `names`. It may overwrite a draft, and be beside
    others in folders of their own. The adapter of a draft must not be beside a whole model, because transformers would load it into
    that model. Raises `ValueError` if there is another model.
    """
    ends = (".safetensors", ".bin", ".index.json")
    weights = [name for name in names if name.endswith(ends) and name != "training_args.bin"]
    if is_adapter:
        if "config.json" in names:
            raise ValueError(
                f"{place} has a whole model, into which transformers would load the draft's adapter. Choose another place."
            )
        return

    def has_draft(folder: str) -> bool:
        at, content = Path(folder, "config.json").as_posix(), None
        with suppress(ValueError):  # cut off: the weights show what it is, if they are not, too
            content = read_json(fetch(at))
        if DRAFT_KEYS & (content or {}).keys():
            return True
        with suppress(ValueError):  # a draft that is broken
            kind, held = kind_of_draft(content or {}, place, {**hub_kwargs, "subfolder": folder})
            return kind is not None or (content is None and not held)
        return True

    if "config.json" in names:
        other = None if has_draft("") else "config.json"
    else:
        folders = {Path(name).parent.as_posix() for name in weights}
        of_drafts = {each for each in folders if f"{each}/config.json" in names and has_draft(each)}
        other = min((name for name in weights if Path(name).parent.as_posix() not in of_drafts), default=None)
    if other is not None:
        raise ValueError(f"{place} has {other} of another model, which the draft would damage. Choose another place.")


def check_finite(draft: "DraftModel", folder: str | Path) -> None:
    """Raises `ValueError` if weights of a draft that is to be saved to a folder are NaN or infinite, which loading refuses."""
    # Those of shards and of quantized layers have types of their own.
    plain = {
        name: weight
        for name, weight in draft.named_parameters()
        if type(weight) is Parameter and weight.dtype in FLOATS
    }
    if broken := [name for name, weight in plain.items() if not weight.is_meta and not weight.isfinite().all()]:
        raise ValueError(
            f"{broken[:3]} of this draft have values that are NaN or infinite, so it could not be loaded again, and nothing was written "
            f"to {folder}. Load the draft of an earlier checkpoint, or train with a lower learning rate."
        )


def check_saving(draft: "DraftModel", folder: str | Path, is_main_process: bool) -> None:
    """
    Checks that a draft can be loaded again, and that it may be saved to a folder (see [`check_folder`]). Raises `ValueError` if
    not, and warns if it does not name its target.
    """
    check_finite(draft, folder)
    if draft.get_output_embeddings().out_features == 0 and not draft._keys_to_ignore_on_save:  # of block drafts
        raise ValueError("This draft stores no head and uses its target's. Call `draft.pair_with(target)` first.")
    quantization = getattr(draft.config, "quantization_config", None)
    # torchao 0.18 reads no names without a dot, such as `d2t`. Block drafts are known by the names of their tensors, which it changes.
    is_unreadable = draft.d2t is not None or draft.config.model_type == "dflash"
    if is_unreadable and getattr(quantization, "quant_method", None) == "torchao":
        raise ValueError(
            "This draft could not be loaded again, because torchao changes the names of tensors that the reader needs. Save it before "
            "it is quantized, and quantize it when you load it (`quantization_config`)."
        )
    try:
        type(draft.config).from_dict(draft.config.to_diff_dict())
    except ValueError as error:
        raise ValueError(f"This draft could not be loaded again. Change its `config` first: {error}") from error
    if is_main_process and not draft._hf_peft_config_loaded:
        check_folder(folder)
    if draft._auto_class is not None and draft.config.speculators_config is None:
        logger.warning_once(
            f"The draft saved in {folder} does not name its target, and vLLM does not load such drafts. Call "
            "`draft.pair_with(target)` before you save it."
        )


def check_folder(folder: str | Path, is_adapter: bool = False) -> None:
    """
    Checks that a draft, or its adapter, may be saved to a folder, which need not exist. Raises `ValueError` if it is a file, or has
    another model, or an adapter, which transformers would load into a whole draft there.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file. Pass a folder, which need not exist.")
    names = ("config.json", ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, *WEIGHT_FILES)
    present = [name for name in names if (folder / name).exists()]
    check_no_other_model(folder, present, folder.joinpath, is_adapter)
    if ADAPTER_CONFIG_NAME in present and not is_adapter:
        raise ValueError(
            f"{folder} has an adapter ({ADAPTER_CONFIG_NAME}), which transformers would load into the draft. Choose another folder."
        )


@contextmanager
def staged(folder: str | Path, variant: str | None = None) -> Iterator[str]:
    """
    Yields a new folder for the files of a draft, or of its adapter. Only when all are written, they replace those in `folder`: a save
    that fails must not damage the draft there.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".saving-") as new:
        yield new
        written = [path.name for path in Path(new).iterdir()]
        for name in written:
            Path(new, name).replace(Path(folder, name))
    if ADAPTER_CONFIG_NAME not in written:
        remove_stale_files(folder, written, variant)


def remove_stale_files(folder: str | Path, written: Collection[str], variant: str | None = None) -> None:
    """
    Removes what an earlier draft left beside one whose files were just `written`: code files that this version does not have, shards,
    and a single file beside shards, or the index of shards that are gone. Readers would take the single file, and vLLM the index.
    """
    single, index = (with_variant(name, variant) for name in WEIGHT_FILES[:2])
    of_shards = re.compile(re.escape(single.removesuffix(".safetensors")) + r"-\d{5}-of-\d{5}\.safetensors")
    code = {f"{name}_eagle3.py" for name in EARLIER_CODE}
    for path in Path(folder).iterdir():
        is_code = path.name in code and path.read_bytes().startswith(b"# SPDX-License-Identifier: ")
        is_of_weights = path.name in (single, index) or of_shards.fullmatch(path.name) is not None
        if path.name not in written and (is_code or is_of_weights):
            path.unlink()


def full_name(repo_id: str, token: bool | str | None) -> str:
    """Returns `<owner>/<name>` of a repo. A name alone is one in the caller's account."""
    return repo_id if "/" in repo_id else f"{HfApi().whoami(token)['name']}/{repo_id}"


def check_repo(repo_id: str, revision: str | None, token: bool | str | None, is_adapter: bool = False) -> None:
    """
    Checks that a draft, or its adapter, may be pushed to a repo, which need not exist. Raises `ValueError` if it has another
    model.
    """
    api = HfApi()
    repo_id = full_name(repo_id, token)
    at: dict[str, Any] = {"revision": revision, "token": token}
    try:
        names = api.list_repo_files(repo_id, **at)
    except RevisionNotFoundError:  # a new branch begins as a copy of the main branch
        return check_repo(repo_id, None, token, is_adapter)
    except RepositoryNotFoundError:
        return
    check_no_other_model(repo_id, names, partial(api.hf_hub_download, repo_id, **at), is_adapter, **at)


@contextmanager
def verifier_without_path(draft: "DraftModel") -> Iterator[None]:
    """Removes the path on this machine from the target's name in the draft's configuration, inside the context."""
    verifier = (draft.config.speculators_config or {}).get("verifier", {})
    name = verifier.get("name_or_path")
    verifier["name_or_path"] = public_name(name)
    try:
        yield
    finally:
        verifier["name_or_path"] = name


def save_checkpoint(folder: str | Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def commit_operations(
    folder: Path, held: Iterable[str], replaced: Collection[str]
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """
    Returns what puts the files of a folder into a repo that has files with the names `held`. Those of an earlier push, by the
    patterns `replaced`, are deleted. Files in folders stay unless a pattern names them: they may be checkpoints, or other drafts.
    """

    def is_replaced(name: str) -> bool:  # `*` would match slashes, too
        return any(fnmatchcase(name, each) and name.count("/") == each.count("/") for each in replaced)

    new = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    old = set(filter(is_replaced, held))
    return [
        *(CommitOperationDelete(name) for name in sorted(old - new.keys())),
        *(CommitOperationAdd(name, path) for name, path in new.items()),
    ]
