"""Pushing a draft with its card and records to the Hub."""

import re
import tempfile
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import logging

from ..checkpoints.files import (
    EARLIER_CODE,
    check_new_folder,
    check_repo,
    commit_operations,
    full_name,
    verifier_without_path,
)
from ..environment import is_path, public_name, without_paths
from ..evaluation import BenchmarkResults
from ..evaluation.plots import PLOTS
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from .card import ENGINE_TAGS, is_edited, is_hub_id, render_card, tag_list
from .licenses import check_license, license_of
from .records import (
    BENCHMARK_RECORD,
    TRAINING_RECORD,
    read_record,
    records_of,
    weights_of,
    write_records,
)


logger = logging.get_logger(__name__)

UNKNOWN_TARGET = (
    "The draft's target is {!r}, which is no folder here, and no model on the Hub that this token can read. Users of the draft could "
    "not find it. Push with the target's name on the Hub (`recipes/push.py --target OWNER/NAME`), with a token that can read that, or "
    "from where its folder is."
)
# Files of an earlier push. They may belong to other weights, or an earlier version of the code. Code under other names stays.
EARLIER_FILES = (
    TRAINING_RECORD,
    BENCHMARK_RECORD,
    *PLOTS,
    *(f"{name}_eagle3.py" for name in EARLIER_CODE),
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "adapter_*",
)


def repo_name(verifier: str) -> str:
    """
    Returns `<target>-speculator.eagle3`, without the target's owner.

    Args:
        verifier (`str`): Name or path of the target.
    """
    return f"{PureWindowsPath(verifier).name}-speculator.eagle3"  # takes both kinds of slashes


def push_draft(
    draft: Eagle3ForSpeculation,
    repo_id: str,
    *,
    training: dict | None = None,
    benchmark: BenchmarkResults | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    overwrite_card: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: str | list[str] | None = None,
) -> CommitInfo:
    """
    Pushes a draft in one commit: weights, configurations, the code that ships with it, records, plots and card. After an
    interruption push again: uploaded weights are not sent twice.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        repo_id (`str`): `<owner>/<name>`, or a name in your account. The repo is made if it does not exist.
        training (`dict`, *optional*), benchmark ([`BenchmarkResults`], *optional*):
            Records for the card: see [`render_card`]. By default those in the folder that the draft was loaded from,
            if they are about its weights.
        license, license_name, license_link (*optional*):
            See [`render_card`]. The license defaults to that of the existing card.
        overwrite_card (`bool`, *optional*, defaults to `False`): Whether to replace a card that was edited by hand.
        commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags (*optional*):
            See [`~transformers.utils.PushToHubMixin.push_to_hub`]. Tags of an existing card stay, if nobody edited it.

    Raises:
        PermissionError: if there is no token.
        ValueError: if `training` or `benchmark` is about other weights, the Hub does not know the license or the draft's target,
            or the repo has another model.
    """
    check_license(license, license_name, license_link)
    if token in (None, True) and get_token() is None:
        raise PermissionError("There is no token to push with. Log in with `hf auth login`, or set `HF_TOKEN`.")
    api = HfApi()
    repo_id = full_name(repo_id, token)
    check_repo(repo_id, revision, token)
    if is_hub_id(verifier := draft.config.verifier) and not api.repo_exists(verifier, token=token):
        raise ValueError(UNKNOWN_TARGET.format(verifier))
    # A new branch begins as a copy of the main branch.
    existing = card_on_hub(repo_id, revision, token) or card_on_hub(repo_id, None, token)
    with tempfile.TemporaryDirectory() as folder:
        card = write_draft(
            draft,
            folder,
            repo_id,
            training=training,
            benchmark=benchmark,
            **license_of(existing, license, license_name, license_link),
            tags=[*kept_tags(existing), *tag_list(tags)],
            max_shard_size=max_shard_size,
            token=token,
        )
        if existing is not None and is_edited(existing) and not overwrite_card:
            logger.warning(f"The card of {repo_id} was edited by hand and is kept. `overwrite_card=True` replaces it.")
            Path(folder, "README.md").unlink()
        else:
            card.validate()
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True, token=token).repo_id
        # Pull requests (`refs/pr/1`) are no branches that could be made.
        if revision is not None and not create_pr and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True, token=token)
        # `upload_folder` may need several commits, and deletes in folders, too.
        return api.create_commit(
            repo_id,
            commit_operations(
                Path(folder), api.list_repo_files(repo_id, revision=revision, token=token), EARLIER_FILES
            ),
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )


def write_draft(
    draft: Eagle3ForSpeculation,
    folder: str | Path,
    repo_id: str,
    *,
    training: dict | None = None,
    benchmark: BenchmarkResults | None = None,
    max_shard_size: int | str = "50GB",
    token: bool | str | None = None,
    **card: Any,
) -> ModelCard:
    """
    Writes to a new or empty folder what [`push_draft`] would push.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        folder (`str` or `Path`): A new or empty folder.
        repo_id (`str`): `<owner>/<name>`, for the card.
        training, benchmark, max_shard_size, token (*optional*): See [`push_draft`].
        card (*optional*): More arguments of [`render_card`], such as `license`.

    Returns:
        `ModelCard`: The card, which is the folder's README.md.

    Raises:
        ValueError: if the folder is not empty, the draft has an adapter, its target was a folder that is gone, or a record is about
            other weights.
    """
    folder = Path(folder)
    check_new_folder(folder)
    if getattr(draft, "_hf_peft_config_loaded", False):
        raise ValueError(
            "This draft has an adapter beside its weights, and engines do not read adapters. Load its base, merge the adapter "
            "into it (`PeftModel.from_pretrained(base, adapter).merge_and_unload()`), and push the result."
        )
    training, benchmark = records_of(draft, training, benchmark, token)
    if benchmark is not None:
        benchmark = BenchmarkResults(without_paths(benchmark.run), benchmark.measurements)
    verifier = draft.config.verifier
    if not is_path(verifier) and re.search(r"\\|/.*/", verifier):  # ids of the Hub have one slash
        raise ValueError(UNKNOWN_TARGET.format(verifier))
    if draft.config.speculators_config is not None and not is_hub_id(verifier):  # without it, saving warns
        logger.warning(
            f"The draft's target is {verifier}, which is not on the Hub, so nobody else can use the draft. The published files name it "
            f"{public_name(verifier)!r}. If the target has another name on the Hub, push with `recipes/push.py --target`."
        )
    with verifier_without_path(draft):
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        write_records(folder, training, benchmark)
        rendered = render_card(repo_id, draft, training=training, benchmark=benchmark, **card)
    rendered.save(folder / "README.md")
    return rendered


def card_on_hub(repo_id: str, revision: str | None = None, token: bool | str | None = None) -> ModelCard | None:
    """
    Returns the card of a repo, or `None` if it has none.

    Args:
        repo_id (`str`): The repo.
        revision (`str`, *optional*): Branch, tag or commit.
        token (`bool` or `str`, *optional*): To read it with.

    Raises:
        ValueError: if its metadata is not YAML, or it is not in UTF-8.
    """
    try:
        path = HfApi().hf_hub_download(repo_id, "README.md", revision=revision, token=token)
    except LocalEntryNotFoundError:  # the Hub was not reached, so the card may exist
        raise
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    try:
        return ModelCard(Path(path).read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (ValueError, yaml.YAMLError) as error:  # somebody wrote it by hand
        raise ValueError(f"The README.md of {repo_id} is no card: {error}. Correct it, or delete it there.") from error


def kept_tags(existing: ModelCard | None) -> list[str]:
    """Returns the tags of an earlier card that a new one keeps, if nobody edited it. Engines may not take the new draft."""
    tags = [] if existing is None or is_edited(existing) else existing.data.get("tags") or []
    return [tag for tag in tags if tag not in ENGINE_TAGS]


def delete_other_benchmark(repo_id: str, weights: str, revision: str | None, token: bool | str | None) -> None:
    """Deletes a benchmark of other weights, with its plots, from a repo that just got the weights with this digest."""
    api = HfApi()
    try:
        path = api.hf_hub_download(repo_id, BENCHMARK_RECORD, revision=revision, token=token)
    except LocalEntryNotFoundError:  # the Hub was not reached
        raise
    except EntryNotFoundError:
        return
    if weights_of(read_record(Path(path))) in (None, weights):
        return
    names = {BENCHMARK_RECORD, *PLOTS}.intersection(api.list_repo_files(repo_id, revision=revision, token=token))
    deletions = [CommitOperationDelete(name) for name in sorted(names)]
    message = "Delete the benchmark of other weights"
    api.create_commit(repo_id, deletions, commit_message=message, revision=revision, token=token)
