"""Pushing a draft, and its card, to the Hub."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard, get_token, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import GenerationConfig
from transformers.utils import logging

from ..environment import public_name, without_paths
from ..evaluation import BenchmarkResults, plot_all
from ..evaluation.results import PLOTS
from ..held import find
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.loading_eagle3 import weights_digest
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from .card import BENCHMARK_RECORD, TRAINING_RECORD, is_edited, is_hub_id, render_card
from .licenses import check_license, license_of


logger = logging.get_logger(__name__)


def repo_name(verifier: str) -> str:
    """
    `<target>-speculator.eagle3`, without the target's owner.

    Args:
        verifier (`str`): Name or path of the target.
    """
    return f"{Path(verifier).name}-speculator.eagle3"


def push_draft(
    draft: Eagle3ForSpeculation,
    repo_id: str,
    *,
    training: dict | None = None,
    benchmark: BenchmarkResults | None = None,
    published: Sequence[dict] = (),
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
    tags: list[str] | None = None,
) -> CommitInfo:
    """
    Pushes weights, configuration, generation configuration, the code that travels with a draft, its records, plot and
    card, in one commit. Weights that the Hub has already are not sent again, so that a push that was cut off is simply
    made again.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        repo_id (`str`): `<owner>/<name>`, or a name of yours; made if it is not there.
        training (`dict`, *optional*), benchmark ([`BenchmarkResults`], *optional*):
            Records for the card: see [`render_card`]. By default those in the folder that the draft was loaded from,
            if they are about the weights it has.
        published, license, license_name, license_link (*optional*):
            See [`render_card`]. The licence is by default that of the card that is there.
        overwrite_card (`bool`, *optional*, defaults to `False`):
            Whether a card that somebody has edited is replaced. By default it stays as it is.
        commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags (*optional*):
            See [`~transformers.utils.PushToHubMixin.push_to_hub`].

    Raises:
        PermissionError: if there is no token.
        ValueError: if `training` or `benchmark` is about other weights, or the licence is none that the Hub knows.
    """
    check_license(license, license_name, license_link)
    if token in (None, True) and get_token() is None:
        raise PermissionError("There is no token to push with. Log in by `hf auth login`, or set `HF_TOKEN`.")
    api = HfApi()
    repo_id = repo_id if "/" in repo_id else f"{api.whoami(token)['name']}/{repo_id}"
    # A branch that is not there yet begins as a copy of the main one.
    there = card_on_hub(repo_id, revision, token) or card_on_hub(repo_id, None, token)
    stated = {"license": license, "license_name": license_name, "license_link": license_link}
    with tempfile.TemporaryDirectory() as folder:
        card = write_draft(
            draft,
            folder,
            repo_id,
            training=training,
            benchmark=benchmark,
            published=published,
            **(stated if license else license_of(there)),
            tags=tags or (),
            max_shard_size=max_shard_size,
        )
        if there is not None and is_edited(there) and not overwrite_card:
            logger.warning(f"The card of {repo_id} was edited, and stays as it is. `overwrite_card=True` replaces it.")
            Path(folder, "README.md").unlink()
        else:
            card.validate()
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True, token=token).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True, token=token)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
            token=token,
            revision=revision,
            create_pr=create_pr,
            # What belongs to other weights, or to another version of the code.
            delete_patterns=[
                TRAINING_RECORD,
                BENCHMARK_RECORD,
                *PLOTS,
                "*_eagle3.py",
                "*.safetensors",
                "*.safetensors.index.json",
            ],
        )


def write_draft(
    draft: Eagle3ForSpeculation,
    folder: str | Path,
    repo_id: str,
    *,
    training: dict | None = None,
    benchmark: BenchmarkResults | None = None,
    published: Sequence[dict] = (),
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    tags: Sequence[str] = (),
    max_shard_size: int | str = "50GB",
) -> ModelCard:
    """
    Writes what [`push_draft`] pushes to a new or empty folder.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        folder (`str` or `Path`): A new or empty folder.
        repo_id (`str`): `<owner>/<name>`, for the card.
        training, benchmark, published, license, license_name, license_link, tags, max_shard_size (*optional*): See there.

    Returns:
        `ModelCard`: The card, which is the folder's README.md.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")
    if getattr(draft, "_hf_peft_config_loaded", False):
        raise ValueError(
            "This draft has an adapter beside its weights, which engines do not read. Load its base, merge the adapter into it "
            "(`PeftModel.from_pretrained(base, adapter).merge_and_unload()`), and push that."
        )
    training, benchmark = records_of(draft, training, benchmark)
    if benchmark is not None:
        benchmark = BenchmarkResults(without_paths(benchmark.run), benchmark.measurements)
    verifier = draft.config.verifier
    if not is_hub_id(verifier):
        logger.warning(
            f"The draft's target is {verifier}, which is not on the Hub: nobody else can use the draft. What is published says "
            f"{public_name(verifier)}. If the target is there under another name, push with `recipes/push.py --target`."
        )
    with verifier_without_path(draft):
        draft.save_pretrained(folder, max_shard_size=max_shard_size)
        write_records(folder, training, benchmark)
        card = render_card(
            repo_id,
            draft,
            training=training,
            benchmark=benchmark,
            published=published,
            license=license,
            license_name=license_name,
            license_link=license_link,
            tags=tags,
        )
    card.save(folder / "README.md")
    return card


@contextmanager
def verifier_without_path(draft):
    """The draft's configuration does not say where on this machine its target lies."""
    verifier = (draft.config.speculators_config or {}).get("verifier", {})
    name = verifier.get("name_or_path")
    verifier["name_or_path"] = public_name(name)
    try:
        yield
    finally:
        verifier["name_or_path"] = name


def records_of(draft, training: dict | None, benchmark: BenchmarkResults | None):
    """How the draft was trained and what was measured with it: what is passed, or what lies beside it."""
    source = draft.config._name_or_path
    records = {TRAINING_RECORD: training, BENCHMARK_RECORD: benchmark}
    found = dict(records)
    for name, record in records.items():
        if record is None and source:
            found[name] = record_beside(source, name)
    if not any(found.values()):
        return None, None
    digest = weights_digest(draft.state_dict())
    for name, record in found.items():
        if record is None or weights_of(record) == digest:
            continue
        if records[name] is not None:
            raise ValueError(
                f"The {Path(name).stem} record is about other weights than this draft's. Measure the draft that you push (`recipes/benchmark.py --json`)."
            )
        logger.warning(f"{name} of {source} is about other weights than this draft's, and is left out.")
        found[name] = None
    return found[TRAINING_RECORD], found[BENCHMARK_RECORD]


def record_beside(source: str, name: str) -> dict | BenchmarkResults | None:
    """The record in the folder or repo that a draft was loaded from, if there is one."""
    try:
        path = find(source, name)
    except OSError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError):
            return None
        raise
    return None if path is None else read_record(path)


def weights_of(record: dict | BenchmarkResults | None) -> str | None:
    """Digest of the weights that a record is about."""
    run = record.run if isinstance(record, BenchmarkResults) else record or {}
    return run.get("draft_weights")


def read_record(path: Path) -> dict | BenchmarkResults | None:
    """
    A record of training or of a benchmark, or `None` if there is no such file.

    Args:
        path (`Path`): [`BenchmarkResults`], if its name ends in `.jsonl`.
    """
    if not path.is_file():
        return None
    return BenchmarkResults.read(path) if path.suffix == ".jsonl" else json.loads(path.read_text(encoding="utf-8"))


def write_records(folder: Path, training: dict | None, benchmark: BenchmarkResults | None) -> None:
    """
    Writes records of a draft beside its weights, and the benchmark's plots.

    Args:
        folder (`Path`): The draft's.
        training (`dict`, *optional*): How it was trained.
        benchmark ([`BenchmarkResults`], *optional*): What was measured with it.
    """
    if training is not None:
        (folder / TRAINING_RECORD).write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
    if benchmark is not None:
        benchmark.write(folder / BENCHMARK_RECORD)
        plot_all(benchmark, folder)


def card_on_hub(repo_id: str, revision: str | None = None, token: bool | str | None = None) -> ModelCard | None:
    """
    The card that a repo has, if it has one.

    Args:
        repo_id (`str`): The repo.
        revision (`str`, *optional*): Branch, tag or commit.
        token (`bool` or `str`, *optional*): To read it with.
    """
    try:
        path = HfApi().hf_hub_download(repo_id, "README.md", revision=revision, token=token)
    except LocalEntryNotFoundError:  # not known to be missing: the Hub was not reached
        raise
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    return ModelCard(Path(path).read_text(encoding="utf-8"), ignore_metadata_errors=True)


def refresh_card(
    repo_id: str,
    *,
    published: Sequence[dict] = (),
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    untrained: ModelCard | None = None,
    revision: str | None = None,
    overwrite_card: bool = False,
    token: bool | str | None = None,
) -> str:
    """
    Renders the card of a draft that is on the Hub again, from the records in its repo, and pushes it if it has
    changed. No weights are read.

    Args:
        repo_id (`str`): The draft's repo.
        untrained (`ModelCard`, *optional*): The card of a repo that holds no draft yet.
        published, license, license_name, license_link, revision, overwrite_card, token (*optional*):
            See [`push_draft`].

    Returns:
        `str`: `"unchanged"`, `"refreshed"`, `"edited by hand, kept"`, `"an adapter, kept"` or `"no draft in it"`.
    """
    check_license(license, license_name, license_link)
    there = card_on_hub(repo_id, revision, token)
    if there is not None and is_edited(there) and not overwrite_card:
        return "edited by hand, kept"
    folder = Path(
        snapshot_download(repo_id, revision=revision, token=token, allow_patterns=["*.json", BENCHMARK_RECORD])
    )
    if (folder / "config.json").exists():
        stated = {"license": license, "license_name": license_name, "license_link": license_link}
        card = card_of_records(repo_id, folder, published=published, **(stated if license else license_of(there)))
    elif (folder / "adapter_config.json").exists():
        return "an adapter, kept"
    elif untrained is not None:
        card = untrained
    else:
        return "no draft in it"
    if there is not None and str(there) == str(card):
        return "unchanged"
    card.push_to_hub(repo_id, token=token, revision=revision, commit_message="Refresh the card")
    return "refreshed"


def card_of_records(repo_id: str, folder: Path, **kwargs) -> ModelCard:
    """
    The card of a draft's configurations and records in a folder, where its weights need not be.

    Args:
        repo_id (`str`): The draft's repo.
        folder (`Path`): The folder.
        kwargs (*optional*): Of [`render_card`].
    """
    config = Eagle3Config.from_pretrained(folder)
    with torch.device("meta"):
        draft = Eagle3ForSpeculation(config)
    if (folder / "generation_config.json").exists():
        draft.generation_config = GenerationConfig.from_pretrained(folder)
    training, benchmark = (read_record(folder / name) for name in (TRAINING_RECORD, BENCHMARK_RECORD))
    if training and benchmark and weights_of(training) != weights_of(benchmark):
        logger.warning(
            f"{BENCHMARK_RECORD} of {repo_id} is about other weights than {TRAINING_RECORD}, and is left out."
        )
        benchmark = None
    return render_card(repo_id, draft, training=training, benchmark=benchmark, **kwargs)
