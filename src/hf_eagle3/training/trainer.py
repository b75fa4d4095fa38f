"""[`Eagle3Trainer`]: TRL's `SFTTrainer`, training a draft by training-time test."""

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput
from trl.data_utils import get_dataset_column_names
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..data import (
    ImageCollator,
    ImageReader,
    check_positions,
    drop_cut_images,
    num_positions,
    report_long_rows,
    shows_images,
)
from ..data.checks import row_lengths
from ..data.encoding import split_documents, taught_within
from ..hub import repo_name
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.modeling_eagle3 import DraftModel
from ..remote_code.target_eagle3 import is_sharded
from .arguments import Eagle3TrainingArguments
from .checkpoint import last_whole_checkpoint, what_is_broken
from .checks import (
    all_datasets,
    check_batches,
    check_call,
    check_optimizer,
    check_parallelism,
    optimizer_name,
)
from .console import show_few
from .evaluation import check_best_metric, check_decoding, decoding_metrics, kept_precision
from .features import (
    FeatureCollator,
    FeatureStore,
    TargetStates,
    describe,
    extract,
    fixed_arguments,
    start_store,
    state_dtype,
)
from .metrics import TTTMetrics
from .models import draft_to_train, load_target
from .optimizer import muon_with_adamw
from .preparation import (
    CheckedCollator,
    SeededLengthSampler,
    encode,
    image_reader,
    prepare_tokenizer,
    prepare_vocabulary,
)
from .record import check_resumption, order_of_rows, rows_with_images
from .saving import DraftSavingTrainer, check_output_folder
from .ttt import TTTBatch, TTTOutput, counted_rows, documents_of, draft_loss


logger = get_logger(__name__)

# A fresh draft has no threshold, because only the probabilities of a trained one say which nodes to verify.
CONFIDENCE_THRESHOLD = 0.02


class Eagle3Trainer(DraftSavingTrainer):
    r"""
    Trains an EAGLE-3 draft for a frozen target that runs in the same process.

    Data sets are those of [`~trl.SFTTrainer`]: `text`, `messages`, or `prompt` and `completion`, with `images` if the
    target sees. With `assistant_only_loss=True` only the assistant's tokens of `messages` are learned.

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
            The draft to train, or its folder or Hub id. `None` makes one by [`Eagle3ForSpeculation.from_target`], with the
            `draft_vocab_size` most frequent supervised tokens of `train_dataset`. A draft in half precision is trained in
            float32, and so are its checkpoints.
        target_model (`str` or `PreTrainedModel`):
            The frozen target, or its folder or Hub id. It may be quantized or spread by a `device_map`. It is not trained
            and not saved.
        train_dataset (`Dataset`, `IterableDataset` or [`FeatureStore`]):
            The data, or features of a target that [`~Eagle3Trainer.extract_features`] stored.
        args ([`Eagle3TrainingArguments`], *optional*):
            The arguments. By default the trainer writes to a folder named after the target.
        processing_class (`PreTrainedTokenizerBase` or `ProcessorMixin`, *optional*):
            The target's tokenizer, or its processor if the data has images. By default it is loaded by the target's name.
        kwargs (*optional*): Other arguments of [`~trl.SFTTrainer`].

    Raises:
        TypeError: if `model` is not a draft, `target_model` not a target, or `args` of another class.
        ValueError: if the draft cannot be trained for this target, with these arguments or on this data, or `output_dir` has
            another model.
    """

    _tag_names = ["eagle3", "speculative-decoding"]
    _name = "EAGLE-3"
    # `compute_loss` divides by the rows of the whole optimizer step.
    loss_is_scaled_for_ga = True  # type: ignore[assignment]  # TRL does not annotate its `None`

    def __init__(
        self,
        model: str | DraftModel | PeftModel | None,
        target_model: str | PreTrainedModel,
        args: Eagle3TrainingArguments | None = None,
        **kwargs: Any,
    ):
        check_call(target_model, kwargs)
        target_name = target_model if isinstance(target_model, str) else target_model.config._name_or_path
        args = self._own_arguments(args, target_name)
        peft_config = kwargs.get("peft_config")
        check_output_folder(args.output_dir, target_name, peft_config is not None or isinstance(model, PeftModel))
        assert not isinstance(args.target_model_init_kwargs, str)  # the arguments check it
        with_images = any(map(shows_images, all_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))))
        target_model, tokenizer, processor = load_target(
            target_model,
            args.target_model_init_kwargs,
            kwargs.get("processing_class"),
            args.trust_remote_code,
            with_images,
        )
        self.images = image_reader(target_model, processor, args)
        if peft_config is not None and getattr(peft_config, "target_modules", ()) is None:
            # PEFT would choose modules by the `model_type`, which a draft does not have.
            peft_config = kwargs["peft_config"] = copy.copy(peft_config)
            peft_config.target_modules = "all-linear"
        vocab_size_from_data = args.draft_vocab_size if model is None else None
        draft = draft_to_train(model, target_model, args, peft_config)
        # The default name is for whole drafts of EAGLE-3. Adapters and drafts of other methods have their own.
        is_whole = peft_config is None and draft.config.model_type == Eagle3Config.model_type
        if args.push_to_hub and args.hub_model_id is None and is_whole:
            args.hub_model_id = repo_name(target_name or "draft")
        target_model.eval().requires_grad_(False)

        self.target_model = target_model
        self.target_vocab_size = target_model.config.get_text_config(decoder=True).vocab_size
        self.num_positions = num_positions(target_model)
        self.callers_optimizer = optimizer_name(kwargs)
        self.dataset_names, self.script_settings = [], {}
        self.is_resumed = False
        # The step of the weights that were loaded at the end, and the length of the log then.
        self.best: tuple[int, int] | None = None
        # The latest loss, its step, and the beginning of its batch.
        self._unchecked_loss: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor] | None = None
        self._ended_pass: Iterator | None = None  # over a stream

        if isinstance(kwargs.get("train_dataset"), FeatureStore) and args.packing:
            raise ValueError("Rows of a feature store are packed when they are extracted. Leave `packing` out.")
        store = self._init_sft_trainer(draft, args, tokenizer, kwargs)
        check_parallelism(self)
        prepare_vocabulary(self.draft, target_model, self.train_dataset, vocab_size_from_data)
        # Here, because these read rows, and each checkpoint has them.
        self.rows_with_images = rows_with_images(self.train_dataset)
        self.order_of_rows = order_of_rows(self.train_dataset, args)
        self._connect_models(store)
        check_batches(self)
        check_optimizer(self)
        check_best_metric(self)
        check_decoding(self)
        self.metrics = TTTMetrics(self.accelerator, args.ttt_steps, args.ttt_step_decay)
        show_few(self)

    def _own_arguments(self, args: Eagle3TrainingArguments | None, target_name: str) -> Eagle3TrainingArguments:
        """Returns a copy of the arguments, because the caller may use them for other trainers."""
        if args is None:
            args = Eagle3TrainingArguments(f"{Path(target_name or 'draft').name}-eagle3")
        if not isinstance(args, Eagle3TrainingArguments):
            raise TypeError(f"`args` must be `Eagle3TrainingArguments`, got {type(args).__name__}.")
        args = copy.copy(args)
        if args.n_gpu > 1:  # `nn.DataParallel` cannot split the target's states of a batch
            logger.warning(
                f"One process trains on one GPU, the first of {args.n_gpu} here. `accelerate launch` starts a process for each."
            )
            args._n_gpu = 1
        return args

    def _init_sft_trainer(
        self,
        draft: DraftModel | PeftModel,
        args: Eagle3TrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: dict[str, Any],
    ) -> FeatureStore | None:
        """Encodes the data and calls `SFTTrainer.__init__`. Returns the feature store, if the data is one."""
        prepare_tokenizer(tokenizer, args, self.target_vocab_size)
        self._encode = partial(
            encode,
            assistant_only_loss=args.assistant_only_loss,
            target_vocab_size=self.target_vocab_size,
            images=self.images,
        )
        # `SFTTrainer` has no hook for these arguments, so it gets others. It would look for the assistant's turns in our
        # tokens, and warn that `model_init_kwargs` are ignored.
        hidden = {"assistant_only_loss": False, "model_init_kwargs": None}
        train_dataset = kwargs.pop("train_dataset", None)
        store = train_dataset if isinstance(train_dataset, FeatureStore) else None
        assert not isinstance(args.dataset_kwargs, str)  # the arguments check it
        skips = (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
        if store is not None:
            train_dataset = store.dataset()
            if "seq_lengths" in store.rows.column_names:
                args.padding_free = True
                hidden["max_length"] = None  # rows were cut when they were extracted
        elif isinstance(train_dataset, Dataset | IterableDataset) and not skips:
            # `SFTTrainer` looks at the first row before it prepares the data.
            train_dataset = self._encode(
                train_dataset, tokenizer, args, formatting_func=kwargs.get("formatting_func"), name="train"
            )
        if isinstance(self.images, ImageReader):
            # Batches have other numbers of images than rows, and accelerate would split them like rows.
            args.accelerator_config = copy.copy(args.accelerator_config)
            args.accelerator_config.dispatch_batches = False
        self._encoded = train_dataset
        self._hidden = {name: getattr(args, name) for name in hidden}
        args.__dict__.update(hidden)
        kwargs |= {"train_dataset": train_dataset, "processing_class": tokenizer}
        super().__init__(model=draft, args=args, **kwargs)
        args.__dict__.update(self._hidden)
        if kwargs.get("data_collator") is not None:
            self.data_collator = CheckedCollator(self.data_collator)
        if type(self.data_collator) is DataCollatorForLanguageModeling and self.padding_free:
            # TRL joins packed rows to one. Most kinds of attention would then compute each row against all the others.
            is_packed = "seq_lengths" in get_dataset_column_names(self.train_dataset)
            self.data_collator = replace(
                self.data_collator, padding_free=args.padding_free and not is_packed, return_position_ids=True
            )
        return store

    def _connect_models(self, store: FeatureStore | None) -> None:
        """Lets the draft read the target, or its stored features."""
        draft = self.draft
        self._move_target(only_ends=store is not None and self.eval_dataset is None)
        draft.borrow_embeddings(self.target_model)
        if not draft.generation_config.assistant_confidence_threshold:
            draft.generation_config.assistant_confidence_threshold = CONFIDENCE_THRESHOLD
        self.aux_layer_ids = draft.resolve_aux_layer_ids(self.target_model)
        self.target_states = TargetStates(self.target_model, self.aux_layer_ids)
        if store is not None:
            description = describe(self.target_model, self.processing_class, self.aux_layer_ids)
            store.check(description, fixed_arguments(self.args))
            self.data_collator = FeatureCollator(self.data_collator, store)
        if isinstance(self.images, ImageReader):
            self.data_collator = ImageCollator(self.data_collator, self.images)
        # One forward of the wrapped model is one unroll, so DDP, FSDP and autocast work as around any forward. This
        # replaces the fused loss that `SFTTrainer` puts there.
        draft.forward = MethodType(_forward_or_unroll, draft)

    def _move_target(self, only_ends: bool = False) -> None:
        """Moves the target, or only its embeddings and head, to the device, unless it is spread over several."""
        if getattr(self.target_model, "hf_device_map", None) is None and not is_sharded(self.target_model):
            ends = self.target_model.get_input_embeddings(), self.target_model.get_output_embeddings()
            for module in ends if only_ends else [self.target_model]:
                module.to(self.accelerator.device)

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: PreTrainedTokenizerBase,
        args: Eagle3TrainingArguments,
        packing: bool,
        formatting_func: Callable | None,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        """Reports rows that `SFTTrainer` would shorten, split or drop silently."""
        if isinstance(dataset, Dataset) and "feature_row" in dataset.column_names:
            return dataset  # prepared when its features were extracted
        if dataset is not self._encoded:
            if isinstance(dataset, Dataset) and "image_data" in dataset.column_names:
                return dataset  # prepared before, as `eval_dataset` is
            dataset = self._encode(dataset, processing_class, args, formatting_func=formatting_func, name=dataset_name)
        # Only batches without padding keep packed documents apart, and `SFTTrainer` would pack rows as if each were one.
        if (packing or not self.padding_free) and "seq_lengths" in get_dataset_column_names(dataset):
            dataset = split_documents(dataset, dataset_name)
        if "max_length" in self._hidden:
            args = copy.copy(args)
            args.max_length = self._hidden["max_length"]
        if self.num_positions is not None:
            check_positions(dataset, self.num_positions, args.max_length, dataset_name)
        dataset = drop_cut_images(dataset, args.max_length, dataset_name)
        is_split = packing and args.packing_strategy != "bfd"
        fate = "split off" if is_split else "cut off (`packing=True` with `packing_strategy='bfd_split'` keeps them)"
        dataset = report_long_rows(dataset, args.max_length, fate, dataset_name)
        has_images = isinstance(dataset, Dataset) and "image_data" in dataset.column_names
        if has_images and args.max_length is not None:
            longest = max(int(lengths.max()) for lengths in row_lengths(dataset))
            if longest <= args.max_length:
                args = copy.copy(args)
                args.max_length = None  # to cut rows is to write all images to the disk again
        if packing and not is_split and args.max_length is not None:
            taught = taught_within(dataset, args.max_length)  # `SFTTrainer` drops the others only without packing
            self._report_dropped(dataset, taught, args.max_length, dataset_name)
            dataset = taught
        try:
            prepared = super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)
        except StopIteration:  # it looks at the first row of a stream
            raise ValueError(
                f"No row of the {dataset_name} data has something to learn within `max_length={args.max_length}`. Raise `max_length`."
            ) from None
        if not packing:
            self._report_dropped(dataset, prepared, args.max_length, dataset_name)
        return prepared

    def _report_dropped(
        self, dataset: Dataset | IterableDataset, kept: Dataset | IterableDataset, max_length: int | None, name: str
    ) -> None:
        """Warns of rows that were dropped, because `max_length` cuts what they teach, or raises an error if all were."""
        if not isinstance(dataset, Dataset) or len(kept) == len(dataset):
            return
        dropped = f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data"
        why = f"have nothing to learn within `max_length={max_length}`"
        if len(kept) == 0:
            raise ValueError(f"{dropped} {why}. Raise `max_length`.")
        logger.warning(f"{dropped} {why}, and are dropped.")

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "feature_row" not in self._signature_columns:
            self._signature_columns += ["feature_row", "image_data", "image_text", "image_end"]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        return SeededLengthSampler(sampler, self) if isinstance(sampler, LengthGroupedSampler) else sampler

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """
        Trains the draft; see [`~transformers.Trainer.train`].

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                The checkpoint to go on from. `True` takes the last whole one, and skips those with a missing, cut off or
                changed file. `"auto"` does so, or begins anew if none was written to its end. By default that of the arguments
                counts; `False` begins anew.
            kwargs (*optional*): Other arguments of [`~transformers.Trainer.train`].

        Raises:
            ValueError: if there is no whole checkpoint, its training is finished, or it was begun with other data or
                settings.
        """
        if resume_from_checkpoint is None:  # `Trainer` would begin anew, and overwrite the checkpoints
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if (is_auto := resume_from_checkpoint == "auto") or resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_whole_checkpoint(may_be_none=is_auto)
        elif (
            resume_from_checkpoint
            and not isinstance(resume_from_checkpoint, bool)
            and (reason := what_is_broken(resume_from_checkpoint)) is not None
        ):
            raise ValueError(
                f"Training cannot go on from {resume_from_checkpoint}: {reason}. Pass `resume_from_checkpoint=True` to go on "
                "from the last checkpoint that is whole, or begin a new training with its draft (`model`)."
            )
        self.is_resumed, self.best = bool(resume_from_checkpoint), None
        if self.is_resumed:
            check_resumption(self, str(resume_from_checkpoint))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _last_whole_checkpoint(self, may_be_none: bool) -> str | None:
        found: list[str | Exception | None] = [None]
        if self.accelerator.is_main_process:  # one process reads the gigabytes
            try:
                found = [last_whole_checkpoint(self.args.output_dir, may_be_none)]
            except Exception as error:  # the other processes wait, and must raise it, too
                found = [error]
        (checkpoint,) = broadcast_object_list(found)
        if isinstance(checkpoint, Exception):
            raise checkpoint
        return checkpoint

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """
        Returns the pass over the data, and how many of its batches come before the next one. `Trainer` does not know how
        long a stream is, takes all steps for one pass, and would begin a later pass anew. The state says where in which
        pass training was: `epoch` is the number of passes, and a share of all steps for the steps of the last one.
        """
        place = super()._init_training_state(*args, **kwargs)
        if isinstance(self.train_dataset, Dataset) or not self.state.epoch or self.args.ignore_data_skip:
            return place
        checkpoint = kwargs.get("resume_from_checkpoint") or args[3]
        max_steps = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).max_steps
        passes = math.ceil(self.state.epoch) - 1  # a whole number is the end of a pass
        steps = round((self.state.epoch - passes) * max_steps)
        return passes, steps * self.args.gradient_accumulation_steps

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Drops the counts first: `auto_find_batch_size` may have begun with a larger batch."""
        self.metrics.clear()
        output = super()._inner_training_loop(*args, **kwargs)
        self._check_loss()
        return output

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.best = self.state.best_global_step, len(self.state.log_history)

    @property
    def progress(self) -> float:
        """The share of training that is done. It must not change within an optimizer step."""
        return self.state.global_step / max(self.state.max_steps, 1)

    @property
    def num_ttt_steps(self) -> int:
        """The steps of the unroll at this point of training."""
        if self.progress >= self.args.ttt_warmup:
            return self.args.ttt_steps
        return 1 + int(self.progress / self.args.ttt_warmup * (self.args.ttt_steps - 1))

    @torch.no_grad()
    def target_features(self, inputs: dict[str, torch.Tensor]) -> TTTBatch:
        """Runs the target on a collated batch, or reads its stored features."""
        features = self.target_states.features(inputs, self.draft.draft_token_ids)
        aux = features[0].to(self.draft.get_output_embeddings().weight.dtype)
        return TTTBatch.of(inputs, aux, features[1:], inputs["labels"])

    def extract_features(
        self, folder: str | Path, rows_per_shard: int = 64, dtype: torch.dtype | str | None = None
    ) -> FeatureStore:
        """
        Writes the target's states on the prepared training data to a folder, and returns it as a [`FeatureStore`] that
        training can read instead of running the target. All processes share the work. If it is interrupted, the same call
        goes on with the missing shards.

        Args:
            folder (`str` or `Path`): The folder. It takes `(n_aux + 1) * hidden_size` numbers per token.
            rows_per_shard (`int`, *optional*, defaults to 64):
                Rows per file. Each process holds a file twice in memory, and an interruption loses at most that.
            dtype (`torch.dtype` or `str`, *optional*):
                The dtype of stored states. By default the target's. `"float8_e4m3fn"` stores each state of each token with
                a scale of its own.

        Raises:
            ValueError: if the data is a stream, the target is sharded by FSDP, the folder holds something else, or states cannot
                be stored in the dtype.
        """
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                "Features of a stream cannot be extracted, because its rows have no numbers. Load the data whole."
            )
        if self.target_states.is_fsdp:
            raise ValueError(
                "A target sharded by FSDP gives no last states to store. Spread it by `device_map` or tensor parallelism."
            )
        if rows_per_shard < 1:
            raise ValueError(f"`rows_per_shard` must be at least 1, got {rows_per_shard}.")
        dtype = state_dtype(dtype or self.target_model.dtype)
        description = describe(self.target_model, self.processing_class, self.aux_layer_ids)
        lock = None
        if self.accelerator.is_main_process:
            arguments = fixed_arguments(self.args)
            lock = start_store(folder, self.train_dataset, description, rows_per_shard, dtype, arguments)
        self.accelerator.wait_for_everyone()
        batch_size = self.args.per_device_train_batch_size
        extract(folder, self.train_dataset, self.target_states, self.data_collator, batch_size, dtype)
        self.accelerator.wait_for_everyone()
        del lock
        return FeatureStore(folder)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self._check_loss()
        batch, steps, shares = self.target_features(inputs), self.args.ttt_steps, {}
        if model.training:
            steps = self.num_ttt_steps
            shares = {"row_share": self.args.ttt_row_share, "num_sampled": self.args.sampled_vocab_size}
        unroll = partial(draft_loss, batch=batch, steps=steps, **shares)
        outputs: TTTOutput = model(unroll=unroll)
        num_rows = outputs.num_rows if num_items_in_batch is None else num_items_in_batch
        weights = self.args.ttt_step_decay ** torch.arange(steps, device=num_rows.device)
        loss = (weights * outputs.loss_sums / num_rows.clamp(min=1)).sum()
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The rows are those of all processes, and DDP takes the mean of their gradients.
            loss = loss * self.accelerator.num_processes

        has_states = batch.aux_hidden_states.isfinite().all()
        self._unchecked_loss = loss.detach(), has_states, self.state.global_step + 1, batch.input_ids[:, :30]
        self.metrics.add("train" if model.training else "eval", outputs)
        return (loss, {"loss": loss}) if return_outputs else loss

    def _check_loss(self) -> None:
        """
        Checks the latest loss, when the next batch begins, and before anything is logged or saved: to look at a loss at once
        would wait for the device. Raises `FloatingPointError` if it is not finite.
        """
        if self._unchecked_loss is None:
            return
        (loss, has_states, step, tokens), self._unchecked_loss = self._unchecked_loss, None
        if not torch.isfinite(loss):
            advice = "Try a lower learning rate, or `bf16` instead of `fp16`."
            if not has_states:
                advice = "The target's states are not finite there: load the target in bfloat16 or float32 (`dtype`)."
            raise FloatingPointError(
                f"The loss is {loss.item()} at step {step}, for a batch that begins with "
                f"{self.processing_class.batch_decode(tokens)}. The draft is not saved; earlier checkpoints are in "
                f"{self.args.output_dir}. {advice}"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_loss()
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch does not say that a disk is full
            free = shutil.disk_usage(self.args.output_dir).free / 1e9
            raise RuntimeError(
                f"The checkpoint of step {self.state.global_step} could not be saved: {error}. The disk of {self.args.output_dir} has "
                f"{free:.2f} GB left. Training can resume from the checkpoint before."
            ) from error

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if not self.args.use_muon or self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*args, **kwargs)
        self.optimizer = muon_with_adamw(self.model, self.get_decay_parameter_names(self.model), self.args)
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """
        Lets all processes end a pass over a stream at the same step. Their parts of it may have different lengths, and
        processes that begin the next pass alone wait for the others forever.

        Raises `ValueError` if the data is a stream that ends before the first step. `Trainer` would end, or begin it again and
        again.
        """
        if self.args.world_size > 1 and not isinstance(self.train_dataset, Dataset):
            if epoch_iterator is self._ended_pass:
                return [], None
            mine = list(islice(epoch_iterator, num_batches))
            fewest = torch.tensor(len(mine), device=device)
            torch.distributed.all_reduce(fewest, torch.distributed.ReduceOp.MIN)
            if fewest < num_batches:
                self._ended_pass = epoch_iterator
            epoch_iterator = iter(mine[:fewest])
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and self.state.global_step == 0:
            per_device, accumulation = self._train_batch_size, self.args.gradient_accumulation_steps
            raise ValueError(
                f"The train data ended before the first step, which takes {per_device * accumulation * self.args.world_size} rows "
                f"(`per_device_train_batch_size={per_device}`, `gradient_accumulation_steps={accumulation}`). Too few of its rows have "
                f"something to learn within `max_length={self.args.max_length}`."
            )
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[dict], device: torch.device) -> torch.Tensor:
        """
        Returns the number of rows that count at each drafting step, over all batches of an optimizer step and all
        processes, `(steps,)`.
        """
        num_rows = torch.zeros(self.num_ttt_steps, dtype=torch.long, device=device)
        for inputs in batch_samples:
            documents = documents_of(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
            counts = [counted_rows(inputs["labels"], documents, step).sum() for step in range(self.num_ttt_steps)]
            num_rows += torch.stack(counts).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_rows = self.accelerator.reduce(num_rows, "sum")
        return num_rows

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._without_repeated_rows(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        assert isinstance(loss, torch.Tensor)  # without outputs
        return loss.detach(), None, None

    def _without_repeated_rows(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Masks the labels of rows that accelerate repeats, so that all processes have as many. `Trainer` drops their losses, but
        our counts have no rows. With `padding_free` a batch is one row, which counts if any of it is new.
        """
        state, process = self.accelerator.gradient_state, self.accelerator.process_index
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        num_new = max(state.remainder - process * self.args.eval_batch_size, 0)
        is_new = torch.arange(len(inputs["labels"]), device=inputs["labels"].device) < num_new
        return {**inputs, "labels": inputs["labels"].where(is_new[:, None], -100)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics of training-time test to a log of the loss."""
        self._check_loss()
        if "loss" in logs:
            metrics = self.metrics.pop("train")
            num_steps = sum(name.startswith("accuracy_") for name in metrics)
            loss_per_step = self.metrics.loss_per_step(logs["loss"], "train")
            logs = {**logs, "loss_per_step": loss_per_step, "ttt_steps": num_steps, **metrics}
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: torch.utils.data.DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Adds the metrics of training-time test, and the acceptance length of decoding with the draft."""
        self._move_target()  # training from stored features moves only the ends
        with kept_precision(self.draft):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            metrics = self.metrics.pop("eval") | decoding_metrics(self, dataloader.dataset)
        if (loss := output.metrics.get(f"{metric_key_prefix}_loss")) is not None:
            metrics["loss_per_step"] = self.metrics.loss_per_step(loss, "eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def predict(
        self,
        test_dataset: Dataset | IterableDataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """
        Returns what [`~Eagle3Trainer.evaluate`] measures, for other data. There are no predictions.

        Args:
            test_dataset (`Dataset` or `IterableDataset`): Data of any kind that can be trained on.
            ignore_keys (`list[str]`, *optional*): See [`~transformers.Trainer.predict`].
            metric_key_prefix (`str`, *optional*, defaults to `"test"`): The prefix of the metrics' names.
        """
        if not self._skip_prepare_dataset:
            packing = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
            test_dataset = self._prepare_dataset(
                test_dataset, self.processing_class, self.args, packing, self._formatting_func, metric_key_prefix
            )
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)


def _forward_or_unroll(self: DraftModel, *args: Any, unroll: Callable | None = None, **kwargs: Any) -> Any:
    if unroll is not None:
        return unroll(self)
    return type(self).forward(self, *args, **kwargs)
