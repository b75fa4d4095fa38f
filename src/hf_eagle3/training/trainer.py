"""[`Eagle3Trainer`]: TRL's `SFTTrainer`, training a draft by training-time test."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, SaveStrategy, TrainOutput
from trl.data_utils import get_dataset_column_names
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..data import ImageReader, num_positions, shows_images
from ..data.checks import check_prepared, check_unread_masks, first_row, report_dropped, report_long_rows, row_lengths
from ..data.encoded import read_whole
from ..data.images import ImageCollator
from ..environment import warn_of_slow_bfloat16
from ..files import locked
from ..hub import repo_name
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.target_eagle3 import is_sharded
from .arguments import Eagle3TrainingArguments
from .checkpoint import checkpoint_to_resume, place_in_stream
from .checks import all_datasets, check_batches, check_call, check_optimizer, check_parallelism, optimizer_name
from .console import show_few
from .evaluation import check_best_metric, check_decoding, decoding_metrics, kept_precision, without_repeated_rows
from .features import FeatureCollator, FeatureStore, check_store_arguments, describe, extract, fixed_arguments
from .metrics import TTTMetrics
from .models import draft_to_train, load_target
from .optimizer import muon_with_adamw
from .preparation import (
    CheckedCollator,
    SeededLengthSampler,
    encode,
    fit_rows,
    image_reader,
    prepare_tokenizer,
    prepare_vocabulary,
)
from .record import check_resumption, check_unfinished, learned_tokens, order_of_rows, rows_with_images
from .saving import DraftSavingTrainer, check_output_folder
from .target_states import PADDING_ON_CPU, TargetStates
from .ttt import TTTBatch, TTTOutput, documents_of, draft_loss, num_counted


logger = get_logger(__name__)

# A fresh draft has no threshold, because only the probabilities of a trained one say which nodes to verify.
CONFIDENCE_THRESHOLD = 0.02


class Eagle3Trainer(DraftSavingTrainer):
    r"""
    Trains an EAGLE-3 draft for a frozen target that runs in the same process.

    Data sets are those of [`~trl.SFTTrainer`]: `text`, `messages`, or `prompt` and `completion`, with `images` if the
    target is multimodal. With `assistant_only_loss=True` only the assistant's tokens of `messages` are learned.

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
    # `compute_loss` divides by the positions that count in the whole optimizer step.
    loss_is_scaled_for_ga = True  # type: ignore[assignment]  # TRL does not annotate its `None`

    def __init__(
        self,
        model: str | DraftModel | PeftModel | None,
        target_model: str | PreTrainedModel,
        args: Eagle3TrainingArguments | None = None,
        **kwargs: Any,
    ):
        check_call(target_model, args, kwargs)
        target_name = target_model if isinstance(target_model, str) else target_model.config._name_or_path
        args = self._own_arguments(args, target_name)
        peft_config = kwargs.get("peft_config")
        assert args.output_dir is not None  # the arguments have a default
        check_output_folder(args.output_dir, target_name, peft_config is not None or isinstance(model, PeftModel))
        assert not isinstance(args.target_model_init_kwargs, str)  # the arguments check it
        with_images = any(map(shows_images, all_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))))
        if args.chat_template_path is not None or args.eos_token is not None:  # the caller's stays as it is
            kwargs["processing_class"] = copy.deepcopy(kwargs.get("processing_class"))
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
        self.has_chat_template = tokenizer.chat_template is not None  # before the arguments replace it
        self.num_positions = num_positions(target_model)
        self.callers_optimizer = optimizer_name(kwargs)
        self.dataset_names, self.script_settings = [], {}
        self.resumed_from: str | None = None  # a checkpoint
        # The step of the weights that were loaded at the end, and the length of the log then.
        self.best: tuple[int, int] | None = None
        # The latest loss, whether the target's states were finite, the step, and the beginning of the batch.
        self._unchecked_loss: tuple[torch.Tensor, torch.Tensor, int, torch.Tensor] | None = None
        self._ended_pass: Iterator | None = None  # over a stream
        self._encoded: Dataset | IterableDataset | None = None  # the train data, before it is prepared

        store = kwargs["train_dataset"] if isinstance(kwargs["train_dataset"], FeatureStore) else None
        if store is not None:
            check_store_arguments(store, args)
        prepare_tokenizer(tokenizer, args, self.target_vocab_size)
        self._init_sft_trainer(draft, args, tokenizer, store, kwargs)
        check_parallelism(self)
        prepare_vocabulary(self.draft, target_model, self.train_dataset, vocab_size_from_data)
        # Here, because these read rows, and each checkpoint has them.
        self.rows_with_images = rows_with_images(self.train_dataset)
        self.order_of_rows = order_of_rows(self.train_dataset, args)
        self.learned_tokens = learned_tokens(self.train_dataset)
        self._connect_models(store)
        self._complete_collator(store, is_callers=kwargs.get("data_collator") is not None)
        check_batches(self)
        check_optimizer(self)
        check_best_metric(self)
        check_decoding(self)
        self.metrics = TTTMetrics(self.accelerator, args)
        show_few(self)

    def _own_arguments(self, args: Eagle3TrainingArguments | None, target_name: str) -> Eagle3TrainingArguments:
        """Returns a copy of the arguments, because the caller may use them for other trainers."""
        if args is None:
            args = Eagle3TrainingArguments(f"{Path(target_name or 'draft').name}-eagle3")
        args = copy.copy(args)
        if args.n_gpu > 1:  # `nn.DataParallel` cannot split the target's states of a batch
            logger.warning(
                f"One process trains on one GPU, the first of {args.n_gpu} here. `accelerate launch` starts a process for each. A target "
                "that `device_map` spreads over the GPUs needs one process."
            )
            args._n_gpu = 1
        args.accelerator_config = copy.copy(args.accelerator_config)  # `SFTTrainer` writes into it
        return args

    def _init_sft_trainer(
        self,
        draft: DraftModel | PeftModel,
        args: Eagle3TrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        store: FeatureStore | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Calls `SFTTrainer.__init__` with encoded data, and with a few other arguments than the caller's."""
        # Accelerate joins and splits batches, which have rows of several lengths and other numbers of images than rows.
        args.accelerator_config.dispatch_batches = False
        is_packed = store is not None and "seq_lengths" in store.rows.column_names
        args.padding_free = args.padding_free or is_packed
        self.given_args = copy.copy(args)
        kwargs["train_dataset"] = self._read_train_data(tokenizer, store, kwargs)
        # It would look for the assistant's turns in our tokens, and warn that `model_init_kwargs` are ignored.
        hidden: dict[str, Any] = {"assistant_only_loss": False, "model_init_kwargs": None}
        if is_packed:  # it refuses `max_length` without padding, but rows were cut when they were extracted
            hidden["max_length"] = None
        args.__dict__ |= hidden
        super().__init__(model=draft, args=args, **kwargs | {"processing_class": tokenizer})
        args.__dict__ |= {name: getattr(self.given_args, name) for name in hidden}

    def _read_train_data(
        self, tokenizer: PreTrainedTokenizerBase, store: FeatureStore | None, kwargs: dict[str, Any]
    ) -> Dataset | IterableDataset:
        """Returns the rows of a store, or the train data: encoded, or checked if it is trained on as it is."""
        if store is not None:
            return store.dataset()
        args = self.given_args
        assert not isinstance(args.dataset_kwargs, str)  # the arguments check it
        if not (args.dataset_kwargs or {}).get("skip_prepare_dataset", False):
            # Now, because `SFTTrainer` looks at the first row before it prepares the data.
            self._encoded = encode(self, kwargs["train_dataset"], tokenizer, kwargs.get("formatting_func"), "train")
            return self._encoded
        train, *evaluated = all_datasets(kwargs["train_dataset"], kwargs.get("eval_dataset"))
        first_row(train, "train")  # `SFTTrainer` takes it, and raises an empty `StopIteration` without one
        for dataset, name in [(train, "train"), *((each, "eval") for each in evaluated if each is not None)]:
            has_collator = kwargs.get("data_collator") is not None
            if not has_collator or "input_ids" in get_dataset_column_names(dataset):  # a collator may tokenize
                check_prepared(dataset, self.target_vocab_size, name, may_be_padded=has_collator)
                if isinstance(dataset, Dataset) and len(dataset) > 0:
                    report_long_rows(dataset, args.max_length, "kept by `skip_prepare_dataset=True`", name)
            if not has_collator:
                asked = [option for option in ("assistant_only_loss", "completion_only_loss") if getattr(args, option)]
                check_unread_masks(get_dataset_column_names(dataset), asked, name)
        return train

    def _complete_collator(self, store: FeatureStore | None, is_callers: bool) -> None:
        """Adds to batches what the target reads beside the tokens. Checks those of a caller's collator."""
        if is_callers:
            self.data_collator = CheckedCollator(self.data_collator)
        elif isinstance(self.data_collator, DataCollatorForLanguageModeling):
            if self.args.bf16 and self.args.device.type == "cpu" and self.args.pad_to_multiple_of is None:
                config = self.target_model.config.get_text_config(decoder=True)
                longest = getattr(config, "max_position_embeddings", None) or PADDING_ON_CPU
                self.data_collator.pad_to_multiple_of = math.gcd(PADDING_ON_CPU, longest)
            if self.padding_free or self._skip_prepare_dataset:
                datasets = [each for each in all_datasets(self.train_dataset, self.eval_dataset) if each is not None]
                are_packed = ["seq_lengths" in get_dataset_column_names(each) for each in datasets]
                # TRL joins packed rows to one. Most kinds of attention would then compute each row against all the others.
                self.data_collator.padding_free = self.args.padding_free and not are_packed[0]
                # By default TRL takes a row for one document if it was packed before (`skip_prepare_dataset`).
                self.data_collator.return_position_ids = self.padding_free or any(are_packed)
        if store is not None:
            self.data_collator = FeatureCollator(self.data_collator, store)
        if isinstance(self.images, ImageReader):
            self.data_collator = ImageCollator(self.data_collator, self.images)

    def _connect_models(self, store: FeatureStore | None) -> None:
        """Lets the draft read the target, or its stored features."""
        draft = self.draft
        self._move_target(only_ends=store is not None and self.eval_dataset is None)
        draft.borrow_embeddings(self.target_model)
        if not draft.generation_config.assistant_confidence_threshold:
            draft.generation_config.assistant_confidence_threshold = CONFIDENCE_THRESHOLD
        self.aux_layer_ids = draft.resolve_aux_layer_ids(self.target_model)
        self.target_states = TargetStates(self.target_model, self.aux_layer_ids)
        warn_of_slow_bfloat16(self.target_model, self.accelerator.device, logger)
        if store is not None:
            description = describe(self.target_model, self.processing_class, self.aux_layer_ids)
            store.check(description, fixed_arguments(self.args))
        # One forward of the wrapped model is one unroll, so DDP, FSDP and autocast work as around any forward. This
        # replaces the fused loss that `SFTTrainer` puts there.
        draft.forward = MethodType(forward, draft)

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
        """Encodes rows, and reports those that `SFTTrainer` would shorten, split or drop silently."""
        if dataset is not self._encoded:
            if isinstance(dataset, Dataset) and {"feature_row", "image_data"} & set(dataset.column_names):
                return dataset  # prepared before, as a feature store and `eval_dataset` are
            dataset = encode(self, dataset, processing_class, formatting_func, dataset_name)
            if isinstance(dataset, IterableDataset) and args.world_size > 1:
                dataset = read_whole(dataset)  # processes must evaluate the same number of batches
        dataset = fit_rows(self, dataset, packing, dataset_name)
        args = copy.copy(self.given_args)
        has_images = isinstance(dataset, Dataset) and "image_data" in dataset.column_names
        if has_images and args.max_length is not None and row_lengths(dataset).max() <= args.max_length:
            args.max_length = None  # to cut rows is to write all images to the disk again
        try:
            prepared = super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)
        except StopIteration:  # it looks at the first row of a stream
            raise ValueError(
                f"No row of the {dataset_name} data has something to learn within `max_length={args.max_length}`. Raise `max_length`."
            ) from None
        if not packing:
            why = f"they have nothing to learn within `max_length={args.max_length}`"
            report_dropped(dataset, prepared, dataset_name, why)
        return prepared

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "feature_row" not in self._signature_columns:
            self._signature_columns += ["feature_row", "image_data", "image_text", "image_end"]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)
        return SeededLengthSampler(sampler, self) if isinstance(sampler, LengthGroupedSampler) else sampler

    def _get_dataloader(
        self, dataset: Any, description: str, *args: Any, **kwargs: Any
    ) -> torch.utils.data.DataLoader:
        """Reads a stream whole that several processes evaluate: its files may give them other numbers of batches."""
        if isinstance(dataset, IterableDataset) and self.args.world_size > 1 and description != "Training":
            dataset = read_whole(dataset)
        return super()._get_dataloader(dataset, description, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """
        Trains the draft; see [`~transformers.Trainer.train`].

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                The checkpoint to resume from. `True` takes the last intact one, and skips those with a missing, truncated or
                changed file. `"auto"` does the same, or starts from the beginning if no checkpoint was completed. `False` starts
                from the beginning. By default the arguments decide.
            kwargs (*optional*): Other arguments of [`~transformers.Trainer.train`].

        Raises:
            ValueError: if another process trains into `output_dir`, there is no intact checkpoint, its training is finished, or
                it was started with other data or settings.
        """
        if resume_from_checkpoint is None:  # `Trainer` would begin anew, and overwrite the checkpoints
            resume_from_checkpoint = self.args.resume_from_checkpoint
        self.resumed_from, self.best = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir), None
        if self.resumed_from is not None:
            check_resumption(self, self.resumed_from)
        return super().train(resume_from_checkpoint=self.resumed_from, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """
        Returns the pass over the data, and how many of its batches come before the next one. Raises `ValueError` if no step is left.
        """
        place = super()._init_training_state(*args, **kwargs)
        if self.resumed_from is None:
            return place
        check_unfinished(self.resumed_from, self.state)
        if self.args.load_best_model_at_end and self.state.best_global_step:
            self._find_best_checkpoint(self.resumed_from)
        if isinstance(self.train_dataset, Dataset) or self.args.ignore_data_skip:
            return place
        return place_in_stream(self.resumed_from, self.args.gradient_accumulation_steps)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Drops the counts first: `auto_find_batch_size` may have begun with a larger batch. Locks the output folder."""
        self.metrics.clear("train")
        folder = Path(self.args.output_dir, ".cache", "huggingface")  # whose files are not pushed
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / "training.lock", self.args.output_dir) if self.accelerator.is_main_process else None
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        finally:
            if lock is not None:
                lock.release()
        self._check_loss()
        return output

    def _find_best_checkpoint(self, resumed_from: str) -> None:
        """
        Looks for the best checkpoint beside the one to resume, whose folder may have been moved. Starts a new choice if there is
        none: it is gone, or was never saved, as without `load_best_model_at_end`.
        """
        state, name = self.state, f"checkpoint-{self.state.best_global_step}"
        for place in (Path(resumed_from).with_name(name), Path(state.best_model_checkpoint or "")):
            if place.name == name and place.is_dir():
                state.best_model_checkpoint = str(place)
                return
        logger.warning(
            "There is no %s, the best checkpoint (%s of %.4g). The best of the checkpoints from here on is taken.",
            name,
            self.args.metric_for_best_model,
            state.best_metric,
        )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Passes over drafts that are not saved, which could not be loaded at the end."""
        is_saved = self.control.should_save or self.args.save_strategy == SaveStrategy.BEST
        return (is_saved or not self.args.load_best_model_at_end) and super()._determine_best_metric(metrics, trial)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not Path(self.state.best_model_checkpoint).is_dir():  # `Trainer` warns, and keeps the last weights
            return
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
    def target_batch(self, inputs: dict[str, torch.Tensor]) -> TTTBatch:
        """Returns what a draft learns from a collated batch. Runs the target, or reads its stored features."""
        aux, *distributions = self.target_states.features(inputs, self.draft.draft_token_ids)
        aux = aux.to(self.draft.get_output_embeddings().weight.dtype)
        return TTTBatch.of(inputs, aux, distributions, inputs["labels"])

    def extract_features(
        self, folder: str | Path, rows_per_shard: int = 64, dtype: torch.dtype | str | None = None
    ) -> FeatureStore:
        """
        Writes the target's states on the prepared training data to a folder, and returns it as a [`FeatureStore`] that
        training can read instead of running the target. All processes share the work. After an interruption, the same call
        writes the missing shards.

        Args:
            folder (`str` or `Path`): The folder. It takes `(n_aux + 1) * hidden_size` numbers per token.
            rows_per_shard (`int`, *optional*, defaults to 64):
                Rows per file. Each process holds a file twice in memory, and an interruption loses at most that.
            dtype (`torch.dtype` or `str`, *optional*):
                The dtype of stored states. By default the target's. `"float8_e4m3fn"` stores each state of each token with
                a scale of its own.

        Raises:
            ValueError: if the data is a stream, the target is sharded by FSDP, the folder holds something else, the disk has too little
                space, or states cannot be stored in the dtype.
        """
        return extract(self, folder, rows_per_shard, dtype)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self._check_loss()
        batch, steps, shares = self.target_batch(inputs), self.args.ttt_steps, {}
        if model.training:
            steps = self.num_ttt_steps
            shares = {"row_share": self.args.ttt_row_share, "sampled_vocab_size": self.args.sampled_vocab_size}
        outputs: TTTOutput = model(unroll=partial(draft_loss, batch=batch, steps=steps, **shares))
        loss = outputs.loss(self.args.ttt_step_decay, num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The rows are those of all processes, and DDP takes the mean of their gradients.
            loss = loss * self.accelerator.num_processes

        has_states = batch.aux_hidden_states.isfinite().all()
        self._unchecked_loss = loss.detach(), has_states, self.state.global_step + 1, batch.input_ids[:, :30]
        self.metrics.add("train" if model.training else "eval", outputs)
        return (loss, {"loss": loss}) if return_outputs else loss

    def _check_loss(self) -> None:
        """
        Checks the latest loss when the next batch begins, and before anything is logged or saved, because reading a loss at
        once would force a sync. Raises `FloatingPointError` if it is not finite.
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
        super()._save_checkpoint(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if not self.args.use_muon or self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*args, **kwargs)
        self.optimizer = muon_with_adamw(self.model, self.get_decay_parameter_names(self.model), self.args)
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | None]:
        """
        Ends a pass over a stream with its last whole step. `Trainer` would add the gradients of the batches after it to the first
        step of the next pass. All processes end a pass at the same step: their parts of the stream may have different lengths, and
        processes that begin the next pass alone wait for the others forever.

        Raises `ValueError` if the data is a stream that ends before the first step. `Trainer` would end, or begin it again and
        again.
        """
        if not isinstance(self.train_dataset, Dataset):
            if epoch_iterator is self._ended_pass:
                return [], None
            mine = list(islice(epoch_iterator, num_batches))
            fewest = torch.tensor(len(mine))
            if self.args.world_size > 1:
                fewest = fewest.to(device)
                torch.distributed.all_reduce(fewest, torch.distributed.ReduceOp.MIN)
            if fewest < num_batches:
                self._ended_pass, mine = epoch_iterator, []
            epoch_iterator = iter(mine)
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
        Returns the number of positions that count at each drafting step, over all batches of an optimizer step and all
        processes, `(steps,)`.
        """
        num_rows = torch.zeros(self.num_ttt_steps, dtype=torch.long, device=device)
        for inputs in batch_samples:
            num_rows += num_counted(inputs["labels"], documents_of(inputs), self.num_ttt_steps).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_rows = self.accelerator.reduce(num_rows, "sum")
        return num_rows

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
        """Returns the loss only, because there are no predictions."""
        return super().prediction_step(model, without_repeated_rows(self, inputs), prediction_loss_only=True)

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
        self, dataloader: torch.utils.data.DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Adds the metrics of training-time test, and the acceptance length of decoding with the draft."""
        self._move_target()  # training from stored features moves only the ends
        self.metrics.clear("eval")  # of an evaluation that was interrupted
        with kept_precision(self.draft):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            metrics = self.metrics.pop("eval") | decoding_metrics(self, dataloader.dataset)
        if "loss" in metrics:
            metrics["loss_per_step"] = self.metrics.loss_per_step(metrics["loss"], "eval")
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


# `pickle` finds a method by the name of its function.
def forward(self: DraftModel, *args: Any, unroll: Callable | None = None, **kwargs: Any) -> Any:
    if unroll is not None:
        return unroll(self)
    return type(self).forward(self, *args, **kwargs)
