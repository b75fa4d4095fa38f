"""What a trainer saves and publishes: drafts with their code, record and card."""

import copy
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from huggingface_hub import CommitInfo, ModelCard
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from trl import SFTTrainer

from ..checkpoints.files import check_folder, check_repo, verifier_without_path
from ..environment import public_name
from ..files import write_atomically
from ..hub import TRAINING_RECORD, card_on_hub, is_edited, read_record, render_card, write_records
from ..hub.card import tag_list
from ..hub.licenses import license_of
from ..hub.push import delete_other_benchmark, kept_tags
from ..hub.records import weights_of
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.draft_model_eagle3 import DraftModel
from ..scripts import command_line
from .checkpoint import CHECKPOINT_FILES, list_files
from .models import without_adapter
from .record import training_record


logger = get_logger(__name__)


def check_output_folder(folder: str | Path, target_name: str | None, is_adapter: bool) -> None:
    """
    Checks that the output folder of a training may hold its draft. It may be that of an earlier training. Raises `ValueError`
    if the folder is the target's, or has another model.
    """
    folder, taken = Path(folder), []
    if target_name:
        path = Path(target_name).resolve()
        is_checkpoint = path.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
        taken = [path, path.parent] if is_checkpoint else [path]  # training deletes old checkpoints
    if folder.resolve() in taken:
        raise ValueError(
            f"`output_dir` is {folder}, the target's folder, which the draft would damage. Choose another."
        )
    check_folder(folder, is_adapter)


class DraftSavingTrainer(SFTTrainer):
    """The part of [`Eagle3Trainer`] that saves drafts, writes their cards and pushes them."""

    model: PreTrainedModel | PeftModel
    target_model: PreTrainedModel
    optimizer: torch.optim.Optimizer | None
    data_collator: Callable
    # For the card: names of the data, and settings of a script that are not in `args`.
    dataset_names: list[str]
    script_settings: dict[str, Any]

    @property
    def draft(self) -> DraftModel:
        """The draft without the wrappers of PEFT and accelerate."""
        return without_adapter(self.accelerator.unwrap_model(self.model))

    @property
    def _is_adapter(self) -> bool:
        return hasattr(self.accelerator.unwrap_model(self.model), "peft_config")

    def whole_draft(self) -> DraftModel:
        """Returns a draft that can generate: the draft, or a copy if FSDP shards its parameters."""
        if not self.is_fsdp_enabled:
            return self.draft
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        draft = self._copy_of_draft(state).to(self.accelerator.device)
        draft.borrow_embeddings(self.target_model)
        return draft

    def _copy_of_draft(self, state_dict: dict[str, Any]) -> DraftModel:
        own_class: Any = next(each for each in type(self.draft).__mro__ if not issubclass(each, FSDPModule))
        draft = own_class(copy.deepcopy(self.draft.config))
        draft.generation_config = copy.deepcopy(self.draft.generation_config)
        draft._keys_to_ignore_on_save = self.draft._keys_to_ignore_on_save  # a block draft may have a head of its own
        model, trained = draft, self.accelerator.unwrap_model(self.model)
        if self._is_adapter:  # PEFT changes the draft itself
            model = get_peft_model(draft, copy.deepcopy(trained.active_peft_config), trained.active_adapter)
        model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state_dict.items()})
        return draft

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch does not say that a disk is full
            free = shutil.disk_usage(self.args.output_dir).free / 1e9
            raise RuntimeError(
                f"The checkpoint of step {self.state.global_step} could not be saved: {error}. The disk of {self.args.output_dir} has "
                f"{free:.2f} GB left. Training can resume from the checkpoint before."
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        """Adds the list of files. All processes write this part of a checkpoint last; one then writes the trainer's state."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            list_files(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Adds the training record. Checkpoints keep the precision of training, so that training can go on from them. Other
        drafts are saved to be used, in the target's precision.
        """
        if not self.args.should_save:
            return super()._save(output_dir, state_dict)
        weights = self.model.state_dict() if state_dict is None else state_dict
        if not all(weight.isfinite().all() for weight in weights.values()):  # after gradients that were not
            raise FloatingPointError(
                f"The draft's weights are not finite after step {self.state.global_step}, and are not saved. Earlier checkpoints are in "
                f"{self.args.output_dir}. Try a lower learning rate."
            )
        folder = Path(output_dir or self.args.output_dir)
        if self._is_adapter:
            super()._save(output_dir, state_dict)
            if self.hub_model_id is not None:  # a published adapter does not name its draft's folder on this machine
                path = folder / "adapter_config.json"
                config = json.loads(path.read_text(encoding="utf-8"))
                config["base_model_name_or_path"] = public_name(config["base_model_name_or_path"])
                write_atomically(path, json.dumps(config, indent=2))
            write_records(folder, training_record(self), None)
            return
        trained, dtype = self.model, self.target_model.dtype
        is_checkpoint = folder.name == f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if is_checkpoint and not (folder / CONFIG_NAME).exists():  # broken, and written again
            (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        is_cast = dtype in (torch.bfloat16, torch.float16) and not is_checkpoint
        # FSDP replaces the draft's class. Its code, not the draft's, would be saved beside the weights.
        if is_cast or self.is_fsdp_enabled:
            draft, state_dict = self._copy_of_draft(weights), None
            self.model = draft.to(dtype) if is_cast else draft
        # A published draft does not name the target's folder on this machine.
        is_published = self.hub_model_id is not None
        try:
            with verifier_without_path(self.accelerator.unwrap_model(self.model)) if is_published else nullcontext():
                super()._save(output_dir, state_dict)
            weights = self.model.state_dict() if state_dict is None else state_dict
        finally:
            self.model = trained
        write_records(folder, training_record(self, weights), None)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Adds the draft's code and record: `Trainer` pushes only weights and configuration of a checkpoint."""
        push = self.push_in_progress
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if push is not None and not push.is_done() and not self.args.hub_always_push:
            return
        if not self._is_adapter:
            others = ("*.safetensors", "*.bin", "*.pt", "*.pth", "optimizer*", TRAINER_STATE_NAME, CHECKPOINT_FILES)
            patterns = shutil.ignore_patterns(*others)
            shutil.copytree(checkpoint_folder, self.args.output_dir, ignore=patterns, dirs_exist_ok=True)
        known = [] if push is None else list(push.jobs)
        super()._push_from_checkpoint(checkpoint_folder)
        for job in self.push_in_progress.jobs:
            if job not in known:
                job.add_done_callback(self._warn_of_failed_push)

    def _warn_of_failed_push(self, job: Future) -> None:
        """Logs the error of a push in the background, which would be silent otherwise."""
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.warning(
                f"A push to {self.hub_model_id} in the background failed: {type(error).__name__}: {error}. Training continues, and "
                f"the files to push are in {self.args.output_dir}."
            )

    @property
    def push_command(self) -> str:
        """The command that pushes the saved draft by hand."""
        folder, repo = str(self.args.output_dir), self.hub_model_id or self.args.hub_model_id or "<owner>/<name>"
        if self._is_adapter or self.draft.config.model_type != Eagle3Config.model_type:
            return command_line(["hf", "upload", repo, folder, "--exclude", f"{PREFIX_CHECKPOINT_DIR}-*/*"])
        return command_line(["python", "recipes/push.py", folder, "--repo_id", repo])

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """
        Writes README.md to the output folder; see [`render_card`]. An edited card stays as it is. `model_name` is by default
        the Hub id, or else the folder's name. `dataset_name` has the names of the data, and `tags` more tags than those of
        every draft.
        """
        if not self.is_world_process_zero() or self.draft.config.model_type != Eagle3Config.model_type:
            return  # drafts of other methods have no cards
        self._name_datasets(dataset_name)
        card_file = Path(self.args.output_dir, "README.md")
        keeps_card, published = self._keeps_card(card_file)
        if keeps_card:
            return
        card = render_card(
            self.hub_model_id or model_name or card_file.resolve().parent.name,
            self.draft,
            verifier=self.target_model.config._name_or_path,
            training=training_record(self),
            adapter_of=self.draft.config._name_or_path if self._is_adapter else None,
            tags=[*kept_tags(published), *tag_list(tags)],
            **license_of(published),
        )
        card.save(card_file)

    def _keeps_card(self, card_file: Path) -> tuple[bool, ModelCard | None]:
        """
        Returns whether the card in the folder or on the Hub was edited, or cannot be read, and the one on the Hub. Warns if so.
        """
        is_ours = card_file.exists() and not self._is_adapter  # PEFT writes a card of its own beside an adapter
        if is_ours and is_edited(ModelCard.load(card_file, ignore_metadata_errors=True)):
            logger.warning(f"{card_file} was edited, and stays as it is.")
            return True, None
        if self.hub_model_id is None:
            return False, None
        there = None
        try:
            there = card_on_hub(self.hub_model_id, self.args.hub_revision, self.args.hub_token)
            reason = "was edited" if there is not None and is_edited(there) else None
        except Exception as error:  # no reason to stop training. Those of the HTTP client are not `OSError`s
            reason = f"cannot be read now ({error})"
        if reason is not None:
            logger.warning(f"The card of {self.hub_model_id} {reason}, and stays as it is.")
            card_file.unlink(missing_ok=True)
        return reason is not None, there

    def push_to_hub(
        self, *args: Any, dataset_name: str | list[str] | None = None, **kwargs: Any
    ) -> CommitInfo | str | None:
        """
        Pushes the draft with its card and `training.json`, in one commit; see [`~trl.SFTTrainer.push_to_hub`] for `args` and
        `kwargs`. `dataset_name` has the names of the data, for the card. A benchmark of other weights in the repo is deleted.
        """
        self._name_datasets(dataset_name)
        try:
            commit = super().push_to_hub(*args, **kwargs)
        except Exception:
            if self.is_world_process_zero():
                logger.error(
                    f"The draft was not pushed to {self.hub_model_id}; the reason follows. It is in {self.args.output_dir}. To "
                    f"push it from there: {self.push_command}"
                )
            raise
        if not isinstance(commit, CommitInfo):  # another process pushes, or a thread
            return commit
        try:
            weights = weights_of(read_record(Path(self.args.output_dir, TRAINING_RECORD)))
            place = kwargs.get("revision") or self.args.hub_revision, kwargs.get("token") or self.args.hub_token
            if weights is not None:  # an adapter's record has none
                delete_other_benchmark(self.hub_model_id, weights, *place)
        except Exception as error:  # the draft was pushed
            logger.warning(
                f"{self.hub_model_id} may have a benchmark of other weights, which was not deleted: {error}"
            )
        return commit

    def init_hf_repo(self, token: str | None = None, **kwargs: Any) -> None:
        """Refuses a repo that has another model."""
        super().init_hf_repo(token, **kwargs)
        if self.is_world_process_zero():
            check_repo(self.hub_model_id, self.args.hub_revision, token or self.args.hub_token, self._is_adapter)

    def _name_datasets(self, names: str | list[str] | None) -> None:
        if names:
            self.dataset_names = [names] if isinstance(names, str) else list(names)
