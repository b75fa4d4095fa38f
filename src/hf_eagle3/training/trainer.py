"""[`Eagle3Trainer`]: TRL's `SFTTrainer`, training a draft by training-time test."""

import copy
import shlex
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from huggingface_hub import ModelCard
from peft import get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from trl import SFTTrainer

from ..data import (
    RowEncoder,
    check_chat_template,
    check_lengths,
    check_positions,
    count_tokens,
    coverage,
    documents_of_row,
    encode_rows,
    kind_of_data,
    most_frequent_tokens,
    num_positions,
    plain_rows,
    prompt_of,
    report_long_rows,
)
from ..data.rows import MASKS
from ..hub import card_on_hub, is_edited, render_card, repo_name, write_records
from ..hub.push import verifier_without_path
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.modeling_eagle3 import DraftModel
from ..remote_code.target_eagle3 import is_sharded
from ..tokenizer import padding_token, read_template
from .arguments import Eagle3TrainingArguments
from .checkpoint import CHECKPOINT_FILES, last_whole_checkpoint, list_files, what_is_broken
from .console import show_few
from .echo import EchoBuffer, EchoSampler
from .features import FeatureCollator, FeatureStore, TargetStates, describe, extract, start_store
from .models import default_generation, draft_to_train, load_target
from .on_policy import Rollouts
from .optimizer import muon_with_adamw
from .record import check_resumption, training_record
from .ttt import TreeLevel, TTTBatch, TTTOutput, counted_rows, documents_of, draft_loss


logger = get_logger(__name__)


class Eagle3Trainer(SFTTrainer):
    r"""
    Trains an EAGLE-3 draft for a frozen target that runs in the same process.

    Data sets are those of [`~trl.SFTTrainer`]: `text`, `messages` (with `assistant_only_loss=True` only the
    assistant's tokens are learned) or `prompt` and `completion`.

    ```py
    trainer = Eagle3Trainer(
        model=None,  # a fresh draft, with its vocabulary taken from the data
        target_model=target,
        args=Eagle3TrainingArguments("my-draft", draft_vocab_size=32000),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    ```

    Args:
        model (`str`, [`Eagle3ForSpeculation`] or `PeftModel`, *optional*):
            The draft to train, or its folder or Hub id. `None` makes one by [`Eagle3ForSpeculation.from_target`], with
            the `draft_vocab_size` most frequent supervised tokens of `train_dataset`. Drafts in half precision are
            trained in float32, and so are their checkpoints.
        target_model (`str` or `PreTrainedModel`):
            The frozen target, or its name: a folder or a Hub id. It may be quantized or spread by a `device_map`; it
            is not trained and not saved.
        train_dataset (`Dataset`, `IterableDataset` or [`FeatureStore`]):
            Data, or features of a target that were extracted from data before ([`~Eagle3Trainer.extract_features`]).
        args ([`Eagle3TrainingArguments`], *optional*):
            Arguments. By default those of training into a folder that is named after the target.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The target's tokenizer. Loaded by the target's name, if it has one.
        kwargs (*optional*):
            All others of [`~trl.SFTTrainer`].
    """

    _tag_names = ["eagle3", "speculative-decoding"]
    _name = "EAGLE-3"
    # Arguments that a feature store has settled for training, and that hold for evaluation.
    _for_evaluation: dict = {}
    # `compute_loss` divides by the rows of the whole optimizer step.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: str | DraftModel | None,
        target_model: str | PreTrainedModel,
        args: Eagle3TrainingArguments | None = None,
        **kwargs,
    ):
        if isinstance(target_model, DraftModel) or not (
            isinstance(target_model, str) or hasattr(target_model, "config")
        ):
            raise TypeError(
                "`target_model` must be the target, a causal language model or the name of one, and `model` the draft; "
                f"`target_model` is {type(target_model).__name__}."
            )
        if isinstance(kwargs.get("train_dataset"), dict):
            splits = sorted(kwargs["train_dataset"])
            raise ValueError(f"`train_dataset` has splits {splits}: pass one of them, such as dataset[{splits[0]!r}].")
        target_name = target_model if isinstance(target_model, str) else target_model.config._name_or_path
        if args is None:
            args = Eagle3TrainingArguments(f"{Path(target_name or 'draft').name}-eagle3")
        if not isinstance(args, Eagle3TrainingArguments):
            raise TypeError(f"`args` must be `Eagle3TrainingArguments`, got {type(args).__name__}.")
        if kwargs.get("compute_metrics") is not None:
            raise ValueError(
                "`compute_metrics` would never be called: there are no predictions to hand it. `evaluate` reports the loss, the "
                "accuracy of each drafting step and the acceptance length."
            )
        if kwargs.get("preprocess_logits_for_metrics") is not None:
            raise ValueError("`preprocess_logits_for_metrics` would never be called: no logits are kept.")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "`compute_loss_func` would never be called: the loss is that of training-time test (`loss_type`)."
            )
        args = copy.copy(args)  # whatever is settled here, the caller's are for other trainers, too
        if args.n_gpu > 1:  # `nn.DataParallel` cannot share out a batch that the target has read
            logger.warning(
                f"A process trains the draft on one GPU, the first of {args.n_gpu} here. `accelerate launch` starts a process "
                "for each."
            )
            args._n_gpu = 1
        target_model, kwargs["processing_class"] = load_target(
            target_model, args.target_model_init_kwargs, kwargs.get("processing_class"), args.trust_remote_code
        )
        # PEFT would choose modules by the `model_type`, of which a draft has none.
        if getattr(kwargs.get("peft_config"), "target_modules", "none to choose") is None:
            kwargs["peft_config"] = copy.copy(kwargs["peft_config"])
            kwargs["peft_config"].target_modules = "all-linear"
        self.callers_optimizer = (kwargs.get("optimizers") or (None, None))[0]
        self.dataset_names: list[str] = []  # for the card, and settings of a script that are none of `args`
        self.script_settings: dict = {}
        self.is_resumed = False
        # The step of the weights that were loaded in the end, and how much was logged by then.
        self.best: tuple[int, int] | None = None
        # Adapters and other methods' drafts have repos of their own; that of this name is for whole drafts of EAGLE-3.
        is_ours = getattr(getattr(model, "config", None), "model_type", "eagle3") == Eagle3Config.model_type
        if args.push_to_hub and args.hub_model_id is None and kwargs.get("peft_config") is None and is_ours:
            args.hub_model_id = repo_name(target_name or "draft")
        takes_vocabulary_from_data = model is None and args.draft_vocab_size is not None
        model = draft_to_train(model, target_model, args, kwargs.get("peft_config"))
        target_model.eval().requires_grad_(False)
        self._check_sources(args, target_model, **kwargs)
        store = kwargs["train_dataset"] if isinstance(kwargs.get("train_dataset"), FeatureStore) else None
        if store is not None:
            kwargs["train_dataset"] = self._settle_by_store(store, args)
        self.target_vocab_size = target_model.config.get_text_config(decoder=True).vocab_size
        self.num_positions = num_positions(target_model)
        self._settle_tokenizer(args, kwargs["processing_class"])
        if (
            self.num_positions is not None
            and args.rollout_share > 0
            and args.rollout_max_new_tokens >= self.num_positions
        ):
            raise ValueError(
                f"`rollout_max_new_tokens` is {args.rollout_max_new_tokens}, but the target has a table of {self.num_positions} "
                "positions, which leaves no room for prompts. Pass less."
            )
        # Encoded before `SFTTrainer` looks at the first row.
        self.assistant_only_loss, self._encoded = args.assistant_only_loss, kwargs.get("train_dataset")
        skips = (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
        if store is None and not skips and isinstance(self._encoded, (Dataset, IterableDataset)):
            formatting_func = kwargs.get("formatting_func")
            self._encoded = self._encode(self._encoded, kwargs["processing_class"], args, formatting_func, "train")
            kwargs["train_dataset"] = self._encoded

        # What is not `SFTTrainer`'s business, or no more: it would warn, or refuse it.
        names = ("model_init_kwargs", "loss_type", "assistant_only_loss", "chat_template_path")
        ours = {name: getattr(args, name) for name in names}
        args.model_init_kwargs = args.chat_template_path = None
        args.loss_type, args.assistant_only_loss = "nll", False
        super().__init__(model=model, args=args, **kwargs)
        for name, value in (ours | self._for_evaluation).items():
            setattr(args, name, value)

        if self.is_deepspeed_enabled and args.use_muon:
            raise ValueError(
                "DeepSpeed shares parameters out in flat pieces, and Muon needs whole matrices. Pass `use_muon=False`, or share "
                "them out by FSDP2."
            )
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            raise ValueError(
                "`Trainer` saves no model that FSDP keeps in parts. Set `fsdp_state_dict_type: FULL_STATE_DICT` in accelerate's "
                "configuration, as in recipes/accelerate_configs/fsdp2.yaml."
            )
        if args.sampled_vocab_size is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                "`sampled_vocab_size` takes rows of the draft's head, which FSDP and DeepSpeed keep in parts. Leave it out, or train by "
                "DDP: a draft is small."
            )
        draft = self.draft
        self._settle_vocabulary(draft, target_model, takes_vocabulary_from_data)
        self.target_model = target_model
        self._move_target(only_ends=store is not None and self.eval_dataset is None)
        draft.borrow_embeddings(target_model)
        if (threshold := args.assistant_confidence_threshold) is None:
            threshold = draft.generation_config.assistant_confidence_threshold or 0.02
        draft.generation_config.assistant_confidence_threshold = threshold
        self.aux_layer_ids = draft.resolve_aux_layer_ids(target_model)
        self.target_states = TargetStates(target_model, self.aux_layer_ids)
        if store is not None:
            store.check(describe(target_model, self.processing_class, self.aux_layer_ids))
            self.data_collator = FeatureCollator(self.data_collator, store)
        if hasattr(draft, "training_loss") and (args.ttt_row_share < 1 or args.sampled_vocab_size is not None):
            raise ValueError(
                f"{type(draft).__name__} learns from all rows and tokens in each step. Leave `ttt_row_share` and "
                "`sampled_vocab_size` out."
            )
        # One forward of the wrapped model is one unroll, so that DDP, FSDP and autocast do what they do around a
        # forward. Replaces the fused loss that `SFTTrainer` puts in the same place.
        draft.forward = MethodType(_forward_or_unroll, draft)
        rows_of_step = args.per_device_train_batch_size * args.world_size
        if (
            args.dataloader_drop_last
            and isinstance(self.train_dataset, Dataset)
            and len(self.train_dataset) < rows_of_step
        ):
            raise ValueError(
                f"The train data has {len(self.train_dataset)} rows, which `dataloader_drop_last=True` drops: they do not fill a batch "
                f"of {rows_of_step}. Leave it out, or pass a smaller `per_device_train_batch_size`."
            )
        self._counts: dict[str, torch.Tensor] = {}
        self._loss_weights: dict[str, list[float]] = {"train": [], "eval": []}
        self.rollouts = Rollouts(self) if args.rollout_share > 0 else None
        self.echo = EchoBuffer(self.target_states, args.echo_buffer_size) if args.echo_factor > 1 else None
        show_few(self)

    def _move_target(self, only_ends: bool = False) -> None:
        """To the device, if it is not spread over several; or only its embeddings and head."""
        if getattr(self.target_model, "hf_device_map", None) is None and not is_sharded(self.target_model):
            ends = self.target_model.get_input_embeddings(), self.target_model.get_output_embeddings()
            for module in ends if only_ends else [self.target_model]:
                module.to(self.accelerator.device)

    def _settle_by_store(self, store: FeatureStore, args: Eagle3TrainingArguments) -> Dataset:
        """What was settled when features were extracted is settled for training; evaluation goes by the arguments."""
        if args.packing:
            raise ValueError("Rows of a feature store are packed when they are extracted. Leave `packing` out.")
        self._for_evaluation = {"max_length": args.max_length}
        if "seq_lengths" in store.rows.column_names:
            args.padding_free, args.max_length = True, None
        return store.dataset()

    def _check_sources(self, args, target_model, train_dataset=None, eval_dataset=None, **_) -> None:
        """Whether what is to be learned from can be rolled out, or come again, and what is evaluated can be decoded."""
        if isinstance(eval_dataset, FeatureStore):
            raise ValueError("`eval_dataset` is a feature store, but evaluation decodes: pass a data set.")
        if isinstance(train_dataset, FeatureStore):
            no_rollouts = "training from stored features does not run the target"
            no_echo = "stored features are there as often as epochs read them"
        elif train_dataset is not None and not isinstance(train_dataset, Dataset):
            no_rollouts = "prompts are chosen by their numbers, which rows of a stream do not have"
            no_echo = "batches come again by the numbers of their rows, which those of a stream do not have"
        elif is_sharded(target_model):
            no_rollouts = "each process writes texts of its own, which a target that they share cannot do"
            no_echo = "processes that share a target must run it at the same time"
        else:
            return
        for name, default, reason in (("rollout_share", 0, no_rollouts), ("echo_factor", 1, no_echo)):
            if (value := getattr(args, name)) != default:
                raise ValueError(f"`{name}` is {value}, but {reason}. Leave it out.")

    @staticmethod
    def _settle_tokenizer(args, tokenizer) -> None:
        """Gives the tokenizer the template and the tokens that the arguments name."""
        if args.chat_template_path is not None:
            if not args.chat_template_path.endswith((".jinja", ".j2")):
                raise ValueError(
                    f"`chat_template_path` is {args.chat_template_path}, but must be a Jinja file: the template of another "
                    "tokenizer would bring tokens that the target does not know."
                )
            tokenizer.chat_template = read_template(args.chat_template_path)
        if args.eos_token is not None:
            if args.eos_token not in tokenizer.get_vocab():
                raise ValueError(f"`eos_token` is {args.eos_token!r}, which the tokenizer does not have.")
            tokenizer.eos_token = args.eos_token
        args.pad_token = args.pad_token or padding_token(tokenizer)

    def _encode(self, dataset, tokenizer, args, formatting_func, name: str) -> Dataset | IterableDataset:
        """The tokens of a data set, and what is learned of them."""
        dataset = plain_rows(dataset, name)
        kind = "text" if formatting_func is not None else kind_of_data(dataset, args.dataset_text_field, name)
        is_chat = kind in ("messages", "conversations") or (
            kind == "prompt" and not isinstance(next(iter(dataset))["prompt"], str)
        )
        if is_chat:
            check_chat_template(tokenizer)
        elif self.assistant_only_loss and name == "train" and not {"labels", *MASKS} & set(next(iter(dataset))):
            raise ValueError(
                f"`assistant_only_loss=True` needs conversations, but the {name} data has {kind!r}. Leave it out, or pass "
                "`messages`."
            )
        encoder = RowEncoder(
            tokenizer,
            kind,
            self.target_vocab_size,
            self.assistant_only_loss,
            args.completion_only_loss,
            formatting_func,
        )
        if not is_chat and kind != "input_ids" and tokenizer.eos_token is None:
            logger.warning("The tokenizer has no EOS token: texts are learned without an end. `eos_token` names one.")
        return encode_rows(dataset, encoder, name, args.dataset_num_proc)

    def _settle_vocabulary(self, draft, target_model, takes_it_from_data: bool) -> None:
        """Takes the draft vocabulary from the data, or checks that the draft's own suits it."""
        if draft.config.draft_vocab_size == draft.config.vocab_size and not takes_it_from_data:
            return
        counts = count_tokens(self.train_dataset, draft.config.vocab_size)
        if takes_it_from_data:
            draft.set_draft_vocabulary(most_frequent_tokens(counts, self.args.draft_vocab_size), target_model)
        if takes_it_from_data and draft.config.draft_vocab_size < self.args.draft_vocab_size:
            logger.warning(
                f"`draft_vocab_size` is {self.args.draft_vocab_size}, but the target has {draft.config.draft_vocab_size} tokens."
            )
        share = coverage(counts, draft.draft_token_ids.tolist())
        message = (
            f"Draft vocabulary: {draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens, which make up "
            f"{share:.1%} of the supervised tokens."
        )
        if share < 0.5 and not takes_it_from_data:
            raise ValueError(
                f"{message} The draft could not propose the others: its vocabulary was made for other data, or for another "
                "tokenizer. Make a fresh draft with a vocabulary of this data (`model=None` and `draft_vocab_size`)."
            )
        logger.info(message)

    @property
    def draft(self) -> DraftModel:
        """The draft itself, without PEFT's or accelerate's wrappers."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """`SFTTrainer`'s; but no row is shortened, split or dropped in silence."""
        if isinstance(dataset, Dataset) and "feature_row" in dataset.column_names:
            return dataset  # was prepared when its features were extracted
        if dataset is not self._encoded:
            dataset = self._encode(dataset, processing_class, args, formatting_func, dataset_name)
        if self._for_evaluation:
            args = copy.copy(args)
            for name, value in self._for_evaluation.items():
                setattr(args, name, value)
        check_lengths(dataset, dataset_name)
        if self.num_positions is not None:
            check_positions(dataset, self.num_positions, args.max_length, dataset_name)
        is_split = packing and args.packing_strategy != "bfd"
        fate = "split off" if is_split else "cut off (`packing=True` with `packing_strategy='bfd_split'` keeps them)"
        dataset = report_long_rows(dataset, args.max_length, fate, dataset_name)
        prepared = super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)
        if isinstance(prepared, Dataset) and not packing and len(prepared) < len(dataset):
            dropped = f"{len(dataset) - len(prepared)} of {len(dataset)} rows of the {dataset_name} data"
            why = f"have nothing to learn within `max_length={args.max_length}`"
            if len(prepared) == 0:
                raise ValueError(f"{dropped} {why}.")
            logger.warning(f"{dropped} {why}, and are dropped.")
        return prepared

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """
        See [`~transformers.Trainer.train`]. With `resume_from_checkpoint=True` checkpoints are passed over of which a
        file is cut off, gone or broken.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint, or whether to go on from the last.
            kwargs (*optional*): As there.

        Raises:
            ValueError: if there is no whole checkpoint, or that training is finished, or was begun with other data or
                settings.
        """
        if str(resume_from_checkpoint).lower() == "true":  # text, if it comes from the command line
            found = [None]
            if self.accelerator.is_main_process:  # reads gigabytes
                try:
                    found = [last_whole_checkpoint(self.args.output_dir)]
                except Exception as error:  # for the others, who wait, too
                    found = [error]
            resume_from_checkpoint = broadcast_object_list(found)[0]
            if isinstance(resume_from_checkpoint, Exception):
                raise resume_from_checkpoint
        elif resume_from_checkpoint:
            is_checkpoint = Path(resume_from_checkpoint, TRAINER_STATE_NAME).exists()  # not weights alone
            if is_checkpoint and (reason := what_is_broken(resume_from_checkpoint)) is not None:
                raise ValueError(
                    f"Training cannot go on from {resume_from_checkpoint}: {reason}. Pass `resume_from_checkpoint=True` to go on "
                    "from the last checkpoint that is whole, if there is one, or begin a new training with its draft (`model`)."
                )
        self.is_resumed, self.best = bool(resume_from_checkpoint), None
        if self.is_resumed:
            check_resumption(self, resume_from_checkpoint)
            if self.rollouts is not None:
                self.rollouts.load(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _inner_training_loop(
        self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None
    ):
        """Begins anew with a smaller batch where `auto_find_batch_size` says so: what was counted and kept is of the larger one."""
        self._counts, self._loss_weights = {}, {"train": [], "eval": []}
        if batch_size not in (None, self._train_batch_size):
            for kept in filter(None, (self.echo, self.rollouts)):
                kept.forget()
        return super()._inner_training_loop(
            batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval=ignore_keys_for_eval
        )

    def _load_best_model(self):
        super()._load_best_model()
        self.best = self.state.best_global_step, len(self.state.log_history)

    @property
    def progress(self) -> float:
        """How much of training is done, from 0 to 1. Must not change within an optimizer step."""
        return self.state.global_step / max(self.state.max_steps, 1)

    @property
    def num_ttt_steps(self) -> int:
        """Steps of the unroll at this point of training."""
        if self.progress >= self.args.ttt_warmup:
            return self.args.ttt_steps
        return 1 + int(self.progress / self.args.ttt_warmup * (self.args.ttt_steps - 1))

    @property
    def learns_from_trees(self) -> bool:
        """Whether the draft unrolls by tokens, so that it can be unrolled down a tree."""
        by_tokens = not self.draft.config.is_parallel and not hasattr(self.draft, "training_loss")
        return by_tokens and self.args.rollout_rejected_weight > 0

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if "feature_row" not in self._signature_columns:
            self._signature_columns.append("feature_row")

    def _get_train_sampler(self, train_dataset=None):
        sampler, args = super()._get_train_sampler(train_dataset), self.args
        if self.echo is None:
            return sampler
        num_processes = 1 if args.accelerator_config.split_batches else args.world_size
        batch_size = self._train_batch_size * num_processes
        return EchoSampler(sampler, batch_size, args.echo_buffer_size, args.echo_factor, args.data_seed)

    @torch.no_grad()
    def target_features(self, inputs: dict[str, torch.Tensor]) -> TTTBatch:
        """What the target says about a collated batch, or what is stored about it."""
        if self.echo is not None and self.draft.training and "tree_levels" not in inputs:
            inputs = self.echo(inputs)
        aux, *distributions = self.target_states.features(inputs, self.draft.draft_token_ids)
        tree_levels, of_rollout = [], inputs.get("tree_levels", ()) if self.learns_from_trees else ()
        for level in of_rollout[: self.num_ttt_steps - 1]:
            logits, mass, _ = self.target_states.distributions(level["states"], self.draft.draft_token_ids)
            weights = level["weights"] * self.args.rollout_rejected_weight
            tree_levels.append(TreeLevel(level["tokens"], level["parents"], level["roots"], weights, logits, mass))
        aux = aux.to(self.draft.get_output_embeddings().weight.dtype)
        return TTTBatch.of(inputs, aux, distributions, inputs["labels"], tree_levels)

    def extract_features(
        self, folder: str | Path, rows_per_shard: int = 1024, dtype: torch.dtype | str | None = None
    ) -> FeatureStore:
        """
        Writes the target's states on the prepared training data to a folder that training can read instead of running
        the target; see [`FeatureStore`]. All processes share the work. A shard that is written stays: called again
        with the same arguments, it goes on with those that are missing.

        Args:
            folder (`str` or `Path`): Takes `(n_aux + 1) * hidden_size` numbers a token.
            rows_per_shard (`int`, *optional*, defaults to 1024): What is lost at most when it is interrupted.
            dtype (`torch.dtype` or `str`, *optional*):
                What states are stored in; the target's dtype by default. `"float8_e4m3fn"` stores each state of each
                token with a scale of its own.
        """
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                "Features of a stream cannot be extracted: its rows have no numbers. Load the data whole."
            )
        if self.target_states.is_fsdp:
            raise ValueError(
                "A target sharded by FSDP gives no last states to store. Spread it by `device_map` or tensor parallelism."
            )
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or self.target_model.dtype
        description = describe(self.target_model, self.processing_class, self.aux_layer_ids)
        if self.accelerator.is_main_process:
            start_store(folder, self.train_dataset, description, rows_per_shard, dtype)
        self.accelerator.wait_for_everyone()
        extract(
            folder,
            self.train_dataset,
            self.target_states,
            self.data_collator,
            self.args.per_device_train_batch_size,
            dtype,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        self.accelerator.wait_for_everyone()
        return FeatureStore(folder)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch, steps = self.target_features(inputs), self.num_ttt_steps if model.training else self.args.ttt_steps
        shares = {}
        if model.training:
            shares = {"row_share": self.args.ttt_row_share, "num_sampled": self.args.sampled_vocab_size}
        outputs: TTTOutput = model(unroll=lambda draft: draft_loss(draft, batch, steps, self.args.loss_type, **shares))
        num_rows = outputs.num_rows if num_items_in_batch is None else num_items_in_batch
        weights = self.args.ttt_step_decay ** torch.arange(steps, device=num_rows.device)
        loss = (weights * outputs.loss_sums / num_rows.clamp(min=1)).sum()
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The rows are those of all processes, and DDP takes the mean of their gradients.
            loss = loss * self.accelerator.num_processes

        if not torch.isfinite(loss):  # `Trainer` would log the mean of the others, and go on
            texts = self.processing_class.batch_decode(batch.input_ids[:, :30])
            raise FloatingPointError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, for a batch that begins with {texts}. The "
                f"draft is not saved; earlier checkpoints are in {self.args.output_dir}. Try a lower learning rate, or `bf16` "
                "instead of `fp16`."
            )
        mode = "train" if model.training else "eval"
        counts = (getattr(outputs, count.name) for count in fields(TTTOutput) if count.name != "loss_sums")
        # Later steps, if these were fewer, count no rows.
        counts = F.pad(torch.stack([each.to(self._sum_dtype) for each in counts]), (0, self.args.ttt_steps - steps))
        self._counts[mode] = self._counts.get(mode, 0) + counts
        self._loss_weights[mode].append(sum(self.args.ttt_step_decay**step for step in range(steps)))
        return (loss, {"loss": loss}) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        if not self.args.use_muon or self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*args, **kwargs)
        self.optimizer = muon_with_adamw(self.model, self.get_decay_parameter_names(self.model), self.args)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_rows = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.rollouts is None or self.progress < self.args.rollout_start:
            return batches, num_rows
        batches = self.rollouts.in_place_of_some(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples, device):
        """The rows that count at each TTT step, over all batches of an optimizer step and all processes: `(steps,)`."""
        num_rows = torch.zeros(self.num_ttt_steps, dtype=torch.long)
        for inputs in batch_samples:
            documents = documents_of(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
            num_rows += torch.stack(
                [counted_rows(inputs["labels"], documents, step).sum() for step in range(self.num_ttt_steps)]
            ).cpu()
        num_rows = num_rows.to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_rows = self.accelerator.reduce(num_rows, "sum")
        return num_rows

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.float if self.accelerator.device.type == "mps" else torch.double  # which Apple's GPUs lack

    def _pop_metrics(self, mode: str) -> dict[str, float]:
        """What was counted since it was last asked for, over all processes, one entry a TTT step."""
        counts = self._counts.pop(mode, None)
        if counts is None:
            return {}
        counts = self.accelerator.reduce(counts, "sum")
        num_rows, num_correct, num_sampled, acceptance_sums, num_reached, num_accepted = counts
        conditional = num_accepted / num_reached.clamp(min=1)
        by_step = {
            "accuracy": num_correct / num_rows.clamp(min=1),
            "acceptance_rate": acceptance_sums / num_sampled.clamp(min=1),
            "conditional_acceptance": conditional,
            # Not `num_accepted / num_rows[0]`: a draft that reaches the end of the data was not rejected there.
            "joint_acceptance": conditional.cumprod(dim=0),
        }
        metrics = {
            f"{name}_{step}": value
            for name, values in by_step.items()
            for step, value in enumerate(values.tolist())
            if num_rows[step] > 0  # the unroll came so far
        }
        # A token is emitted in any case; the k-th drafted one if the first k agree.
        metrics["simulated_acceptance_length"] = 1 + by_step["joint_acceptance"].sum().item()
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what training-time test says about drafting."""
        if "loss" in logs:
            metrics = self._pop_metrics("train")
            num_steps = sum(name.startswith("accuracy_") for name in metrics)
            logs = {
                **logs,
                "loss_per_step": self._per_step(logs["loss"], "train"),
                "ttt_steps": num_steps,
                **metrics,
                **({} if self.rollouts is None else self.rollouts.pop_metrics()),
            }
        super().log(logs, start_time)

    def _per_step(self, loss: float, mode: str) -> float:
        """
        The mean loss of a drafting step, by the weights of `ttt_step_decay`: comparable while the unroll grows. `loss` is the
        mean since it was last asked for.
        """
        weights, self._loss_weights[mode] = self._loss_weights[mode], []
        return loss / statistics.mean(weights or [1.0])  # none of a loss that somebody else logs

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Adds the same about `dataloader`, and the acceptance length of decoding with the draft."""
        self._move_target()  # of which training from stored features needs the ends only
        with kept_precision(self.draft):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            metrics = self._pop_metrics("eval") | self._decode(dataloader.dataset)
        if (loss := output.metrics.get(f"{metric_key_prefix}_loss")) is not None:
            metrics["loss_per_step"] = self._per_step(loss, "eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def predict(self, test_dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"):
        """
        What [`~Eagle3Trainer.evaluate`] measures, of other data. There are no predictions to return.

        Args:
            test_dataset (`Dataset` or `IterableDataset`): Data of any kind that can be trained on.
            ignore_keys (`list[str]`, *optional*): As in [`~transformers.Trainer.predict`].
            metric_key_prefix (`str`, *optional*, defaults to `"test"`): For the names of the metrics.
        """
        if not self._skip_prepare_dataset:
            packing = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
            test_dataset = self._prepare_dataset(
                test_dataset, self.processing_class, self.args, packing, self._formatting_func, metric_key_prefix
            )
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @torch.no_grad()
    def _decode(self, dataset) -> dict[str, float]:
        """
        Continues the beginnings of the first rows with the whole tree, greedily. The acceptance length is pooled:
        tokens emitted by verification forwards over the number of those forwards. The coverage is the share of the new
        tokens that the draft's vocabulary has.
        """
        if self.args.num_eval_prompts == 0:
            return {}
        draft = self._whole_draft()
        policy, draft.generation_config.tree_policy = draft.generation_config.tree_policy, "static"
        process, num_processes = self.accelerator.process_index, self.accelerator.num_processes
        if is_sharded(self.target_model):  # which all must run together
            process, num_processes = 0, 1
        sums = torch.zeros(4, dtype=self._sum_dtype, device=self.accelerator.device)
        was_training = draft.training
        draft.eval()
        try:
            with default_generation(self.target_model):
                self._continue_beginnings(dataset, draft, sums, process, num_processes)
        finally:
            draft.train(was_training)
            draft.generation_config.tree_policy = policy
        num_accepted, num_forwards, num_known, num_new = self.accelerator.reduce(sums, "sum").tolist()
        metrics = {"acceptance_length": num_accepted / num_forwards} if num_forwards else {}
        return metrics | ({"vocabulary_coverage": num_known / num_new} if num_new and draft.d2t is not None else {})

    def _continue_beginnings(self, dataset, draft, sums, process, num_processes):
        for row in islice(dataset, process, self.args.num_eval_prompts, num_processes):
            prompt = prompt_of(documents_of_row(row)[0]).to(self.target_model.device)
            max_new_tokens = self.args.eval_max_new_tokens
            if self.num_positions is not None:
                max_new_tokens = min(max_new_tokens, self.num_positions - prompt.shape[-1])
            if max_new_tokens <= 0:
                continue
            sequences = self.target_model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=draft,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                synced_gpus=False,  # where all run it together, they take the same steps
            )
            new, lengths = sequences[0, prompt.shape[-1] :], draft.last_generation.accepted_lengths
            num_known = torch.isin(new, draft.draft_token_ids.to(new.device)).sum().item()
            sums += torch.tensor([sum(lengths), len(lengths), num_known, len(new)], device=sums.device)

    def _whole_draft(self) -> DraftModel:
        """A draft that can generate: where its parameters are sharded among processes, a copy of it."""
        if not self.is_fsdp_enabled:
            return self.draft
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        draft = self._copy_of_draft(state).to(self.accelerator.device)
        draft.borrow_embeddings(self.target_model)
        return draft

    def _copy_of_draft(self, state_dict: dict[str, torch.Tensor]) -> DraftModel:
        own_class = next(each for each in type(self.draft).__mro__ if not issubclass(each, FSDPModule))
        draft = own_class(copy.deepcopy(self.draft.config))
        draft.generation_config = copy.deepcopy(self.draft.generation_config)
        model, trained = draft, self.accelerator.unwrap_model(self.model)
        if self._is_adapter:  # which is put into the draft itself
            model = get_peft_model(draft, copy.deepcopy(trained.active_peft_config), trained.active_adapter)
        model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in state_dict.items()})
        return draft

    def _save_rng_state(self, output_dir):
        """The last that all processes write to a checkpoint; after it comes the state of the trainer, by one."""
        super()._save_rng_state(output_dir)
        if self.rollouts is not None:
            self.rollouts.save(output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            list_files(output_dir)

    def _save(self, output_dir=None, state_dict=None):
        """
        Adds how it was trained, for the card. Checkpoints, from which training goes on, are in the precision it has;
        what is saved otherwise is to be used, and in the target's.
        """
        if not self.args.should_save:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self._is_adapter:
            super()._save(output_dir, state_dict)
            write_records(folder, training_record(self), None)
            return
        trained, dtype = self.model, self.target_model.dtype
        is_checkpoint = folder.name == f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        is_cast = dtype in (torch.bfloat16, torch.float16) and not is_checkpoint
        # FSDP makes another class of the draft's, in a module of its own that would be saved as the draft's code.
        if is_cast or self.is_fsdp_enabled:
            self.model = self._copy_of_draft(self.draft.state_dict() if state_dict is None else state_dict)
            self.model, state_dict = self.model.to(dtype) if is_cast else self.model, None
        # What goes to the Hub does not say where on this machine the target lies.
        is_published = self.hub_model_id is not None
        try:
            with verifier_without_path(self.accelerator.unwrap_model(self.model)) if is_published else nullcontext():
                super()._save(output_dir, state_dict)
            weights = self.model.state_dict() if state_dict is None else state_dict
        finally:
            self.model = trained
        write_records(folder, training_record(self, weights), None)

    def _push_from_checkpoint(self, checkpoint_folder):
        """`Trainer` pushes weights and configuration of a checkpoint; a draft is also its code and its record."""
        push, is_last = self.push_in_progress, self.args.hub_strategy == HubStrategy.END
        is_skipped = is_last or (push is not None and not push.is_done() and not self.args.hub_always_push)
        if self.is_world_process_zero() and not self._is_adapter and not is_skipped:  # nor while those are read there
            others = ("*.safetensors", "*.bin", "*.pt", "*.pth", "optimizer*", TRAINER_STATE_NAME, CHECKPOINT_FILES)
            patterns = shutil.ignore_patterns(*others)
            shutil.copytree(checkpoint_folder, self.args.output_dir, ignore=patterns, dirs_exist_ok=True)
        known = [] if push is None else list(push.jobs)
        super()._push_from_checkpoint(checkpoint_folder)
        for job in [] if self.push_in_progress is None else self.push_in_progress.jobs:
            if job not in known:
                job.add_done_callback(self._mention_failed_push)

    def _mention_failed_push(self, job) -> None:
        """Pushes in the background would fail in silence."""
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.warning(
                f"A push to {self.hub_model_id} in the background failed: {type(error).__name__}: {error}. Training goes on; what was to be "
                f"pushed is in {self.args.output_dir}."
            )

    @property
    def push_command(self) -> str:
        """What pushes by hand what the trainer has saved."""
        folder, repo = str(self.args.output_dir), self.hub_model_id or self.args.hub_model_id or "<owner>/<name>"
        if self._is_adapter or self.draft.config.model_type != Eagle3Config.model_type:
            return shlex.join(["hf", "upload", repo, folder, "--exclude", f"{PREFIX_CHECKPOINT_DIR}-*/*"])
        return shlex.join(["python", "recipes/push.py", folder, "--repo_id", repo])

    @property
    def _is_adapter(self) -> bool:
        return hasattr(self.accelerator.unwrap_model(self.model), "peft_config")

    def create_model_card(self, model_name=None, dataset_name: str | list[str] | None = None, tags=None):
        """
        Writes README.md to the output folder; see [`render_card`].

        Args:
            model_name (`str`, *optional*): By default the Hub id, or else the folder's name.
            dataset_name (`str` or `list[str]`, *optional*): What it says about the data.
            tags (`str` or `list[str]`, *optional*): Tags besides those that every draft has.
        """
        if not self.is_world_process_zero() or self.draft.config.model_type != Eagle3Config.model_type:
            return  # there are no cards for other methods' drafts
        self._name_datasets(dataset_name)
        card_file = Path(self.args.output_dir, "README.md")
        # Beside an adapter peft has written a card of its own.
        is_there = card_file.exists() and not self._is_adapter
        if is_there and is_edited(ModelCard.load(card_file, ignore_metadata_errors=True)):
            logger.warning(f"{card_file} is not what was rendered for a draft, and stays as it is.")
            return
        if self.hub_model_id is not None:
            try:
                there = card_on_hub(self.hub_model_id, self.args.hub_revision, self.args.hub_token)
                reason = "was edited" if there is not None and is_edited(there) else None
            except OSError as error:  # which is no reason to stop training
                reason = f"cannot be read now ({error})"
            if reason is not None:
                logger.warning(f"The card of {self.hub_model_id} {reason}, and stays as it is.")
                card_file.unlink(missing_ok=True)
                return
        card = render_card(
            self.hub_model_id or model_name or card_file.resolve().parent.name,
            self.draft,
            verifier=self.target_model.config._name_or_path,
            training=training_record(self),
            adapter_of=self.draft.config._name_or_path if self._is_adapter else None,
            tags=[tags] if isinstance(tags, str) else tags or (),
        )
        card.save(card_file)

    def push_to_hub(self, *args, dataset_name: str | list[str] | None = None, **kwargs):
        """
        See [`~trl.SFTTrainer.push_to_hub`]. What is pushed, in one commit, is a draft with its card and `training.json`.

        Args:
            dataset_name (`str` or `list[str]`, *optional*): What the card says about the data.
            args, kwargs (*optional*): As there.
        """
        self._name_datasets(dataset_name)
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception:
            if self.is_world_process_zero():
                logger.error(
                    f"The draft is not pushed to {self.hub_model_id}, for the reason that follows. It is in {self.args.output_dir}. To "
                    f"push it from there: {self.push_command}"
                )
            raise

    def _name_datasets(self, names: str | list[str] | None) -> None:
        if names:
            self.dataset_names = [names] if isinstance(names, str) else list(names)


@contextmanager
def kept_precision(model: torch.nn.Module) -> Iterator[None]:
    """Gives a model its tensors back: `bf16_full_eval` and `fp16_full_eval` cast it, and training would go on in these."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, data in parameters:
            if parameter.dtype != data.dtype:
                parameter.data = data.to(parameter.device)
        for module, own in buffers:
            for name, buffer in own.items():
                if buffer is not None and module._buffers[name].dtype != buffer.dtype:
                    module._buffers[name] = buffer.to(module._buffers[name].device)


def _forward_or_unroll(self, *args, unroll=None, **kwargs):
    if unroll is not None:
        return unroll(self)
    return type(self).forward(self, *args, **kwargs)
