"""Arguments of [`Eagle3Trainer`]."""

import copy
import inspect
import json
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from trl import SFTConfig

from ..environment import emulates_bfloat16
from ..making import FORMS
from ..remote_code.devices_eagle3 import COPIES_WITHOUT_SYNC


def as_json(value: Any) -> Any:
    """Returns a value of the arguments as JSON types, because trackers write arguments at the first log."""

    def plain(each: Any) -> Any:
        if callable(getattr(each, "to_dict", None)):
            return each.to_dict()
        return vars(each) if is_dataclass(each) else str(each).removeprefix("torch.")

    return json.loads(json.dumps(value, default=plain))


def check_integers(args: Any, **least: int) -> None:
    """Raises `ValueError` if an argument is not an integer, or below its least value."""
    for name, bound in least.items():
        value = getattr(args, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < bound:
            raise ValueError(f"`{name}` must be an integer of at least {bound}, got {value!r}.")


def check_shares(args: Any, *names: str, above_zero: bool = False) -> None:
    """Raises `ValueError` if an argument is not between 0 and 1, or is 0 and must be above."""
    for name in names:
        value = getattr(args, name)
        if not 0 <= value <= 1 or (above_zero and value == 0):
            raise ValueError(f"`{name}` must be in {'(' if above_zero else '['}0, 1], got {value}.")


@dataclass
class Eagle3TrainingArguments(SFTConfig):
    r"""
    Configuration of [`Eagle3Trainer`]. It adds arguments of training-time test to [`~trl.SFTConfig`]. Data preparation, chat
    templates, assistant-only loss, packing, logging and checkpoints have TRL's arguments.

    The packing strategies `"bfd"` (the default) and `"bfd_split"` keep documents apart: attention, unroll and loss stay
    within a document. `"wrapped"` ignores where documents end. It is for running text.

    Args:
        output_dir (`str`, *optional*, defaults to `"trainer_output"`):
            The folder for the draft and its checkpoints. By default `recipes/train.py` names it after the target.
        target_model_init_kwargs (`dict`, *optional*):
            Arguments of `from_pretrained` for a target that is given by its name. `dtype` defaults to `"auto"`.
        model_init_kwargs (`dict`, *optional*):
            Arguments of [`Eagle3ForSpeculation.from_target`] for a fresh draft (`model=None`).
        draft_form (`str`, *optional*, defaults to `"eagle3.1"`):
            The form of a fresh draft. `"classic"` is the EAGLE-3 paper's form. Most engines read it, but its acceptance length is lower.
            `"p-eagle"` drafts all tokens in one pass. `model_init_kwargs` override the form.
        draft_vocab_size (`int`, *optional*):
            The size of a fresh draft's vocabulary. It has the most frequent supervised tokens of the training data. By
            default the draft has the target's whole vocabulary.
        ttt_steps (`int`, *optional*, defaults to `7`):
            The number of drafting steps in the unroll.
        ttt_warmup (`float`, *optional*, defaults to `0.8`):
            The share of training in which the unroll grows from one step to `ttt_steps`. Shallow unrolls are cheaper, and
            a draft must predict one token well before it can predict several. The logged `loss`, a sum over steps, rises
            with each new step. Watch `loss_per_step`, `accuracy_0` and the evaluation, which always has all steps. 0
            unrolls all steps from the beginning, as in the EAGLE-3 paper.
        ttt_step_decay (`float`, *optional*, defaults to `0.8`):
            Step `s` has the weight `ttt_step_decay ** s` in the loss.
        ttt_row_share (`float`, *optional*, defaults to `1.0`):
            The share of its positions that each drafting step passes on to the next, drawn at random. Step `s` computes
            `ttt_row_share ** s` of all positions, and their loss estimates the loss at all of them. Below 1, training sees
            more tokens in the same time, but fewer positions of the later steps.
        sampled_vocab_size (`int`, *optional*):
            Computes the loss on a sample of the draft vocabulary (sampled softmax,
            https://huggingface.co/papers/1412.2007): all tokens to which the target gives a probability of 1% or more anywhere
            in the batch, and this many others or up to a quarter more, drawn at random. A large draft vocabulary takes most of a drafting step's time and memory.
            Does not work with FSDP or DeepSpeed. By default the loss is on all tokens.
        num_eval_prompts (`int`, *optional*, defaults to `16`):
            The number of evaluation rows whose beginnings `evaluate` continues, to measure the acceptance length. 0
            continues none.
        eval_max_new_tokens (`int`, *optional*, defaults to `64`):
            The number of tokens that `evaluate` generates for each of them.
        use_muon (`bool`, *optional*, defaults to `True`):
            Whether Muon trains the matrices other than `lm_head`, and AdamW the rest at a fifth of `learning_rate`. The
            head begins as a copy of the target's, and large steps would undo that. `False` trains everything with `optim`.
        learning_rate (`float`, *optional*, defaults to `1e-3`):
            The peak learning rate.
        adam_beta2 (`float`, *optional*, defaults to `0.95`), max_grad_norm (`float`, *optional*, defaults to `0.5`):
            The second beta of AdamW, and the norm that gradients are clipped to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Off, because the filter forces a sync in each step. A loss that is not finite ends training anyway.
        ddp_timeout (`int`, *optional*, defaults to 21600):
            The seconds that processes wait for each other. transformers' default, half an hour, may be too short: one process
            tokenizes the data for all.
        chat_template_path (`str`, *optional*):
            A Jinja file (`.jinja` or `.j2`) that replaces the chat template of the target's tokenizer.
        gradient_checkpointing (`bool`, *optional*):
            Not supported, because the unroll keeps the keys of every step.

    Raises:
        ValueError: if an argument is out of range, has no effect, or contradicts another one.
    """

    _VALID_DICT_FIELDS = SFTConfig._VALID_DICT_FIELDS + ["target_model_init_kwargs"]

    # Parameters whose default values are overridden from SFTConfig
    learning_rate: float = field(default=1e-3, metadata={"help": "The peak learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "The second beta of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "The norm that gradients are clipped to."})
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]  # transformers' is optional, TRL's is not
        default=None, metadata={"help": "Not supported, because the unroll keeps the keys of every step."}
    )

    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Off, because it forces a sync in each step. A loss that is not finite ends training anyway."
        },
    )
    ddp_timeout: int = field(
        default=6 * 3600,
        metadata={"help": "Seconds that processes wait for each other. One process tokenizes the data for all."},
    )

    # Parameters whose help says what is not so here
    output_dir: str | None = field(default=None, metadata={"help": "The folder for the draft and its checkpoints."})
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "Jinja file (.jinja or .j2) that replaces the chat template of the target's tokenizer."},
    )

    # Parameters that control the target and the draft
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of `from_pretrained` for a target that is given by its name."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Fields of `Eagle3Config`, or of its layer's configuration, for a fresh draft."},
    )
    draft_form: str = field(
        default="eagle3.1",
        metadata={
            "help": "The form of a fresh draft: `eagle3.1`; `classic`, which most engines read and whose acceptance length is lower; or "
            "`p-eagle`, which drafts all tokens in one pass.",
            "choices": list(FORMS),
        },
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "The size of a fresh draft's vocabulary, taken from the data. By default the target's."},
    )

    # Parameters that control training-time test
    ttt_steps: int = field(default=7, metadata={"help": "The number of drafting steps in the unroll."})
    ttt_warmup: float = field(
        default=0.8,
        metadata={"help": "The share of training in which the unroll grows from one step to `ttt_steps`."},
    )
    ttt_step_decay: float = field(
        default=0.8, metadata={"help": "Step `s` has the weight `ttt_step_decay ** s` in the loss."}
    )
    ttt_row_share: float = field(
        default=1.0, metadata={"help": "The share of its positions that each drafting step passes on to the next."}
    )
    sampled_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "The number of improbable tokens in the loss, drawn at random. By default all tokens are in it."
        },
    )
    use_muon: bool = field(
        default=True,
        metadata={"help": "Whether Muon trains the matrices and AdamW the rest. If not, `optim` trains everything."},
    )

    # Parameters that control evaluation
    num_eval_prompts: int = field(
        default=16, metadata={"help": "The number of rows that `evaluate` continues to measure the acceptance length."}
    )
    eval_max_new_tokens: int = field(
        default=64, metadata={"help": "The number of tokens that `evaluate` generates for each of them."}
    )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the token out, because `Trainer` pickles its arguments beside the weights and pushes both."""
        return {**self.__dict__, "hub_token": None}

    def __copy__(self) -> "Eagle3TrainingArguments":
        """Keeps the token, which the default copy loses by `__getstate__`."""
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as JSON types, also objects in arguments of `from_pretrained` (quantization, dtypes)."""
        plain = copy.copy(self)  # `TrainingArguments` writes into dictionaries
        for name in ("model_init_kwargs", "target_model_init_kwargs"):
            setattr(plain, name, as_json(getattr(self, name)))
        return super(Eagle3TrainingArguments, plain).to_dict()

    def __post_init__(self) -> None:
        if self.bf16 is None and self.use_cpu and emulates_bfloat16(torch.device("cpu")):
            self.bf16 = False  # TRL's default, True, would be slower than float32
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith("loss_per_step"):
            self.greater_is_better: bool | None = False  # transformers recognizes losses by the end of their names
        if (said := str(self.resume_from_checkpoint).lower()) in ("true", "false"):  # the command line gives a text
            self.resume_from_checkpoint: Any = said == "true"
        self._check_numbers()
        asks_for_bf16 = self.bf16_full_eval or self.bf16 or (self.bf16 is None and not self.fp16)  # TRL's default
        if asks_for_bf16 and not self.use_cpu and not torch.accelerator.is_available():
            raise ValueError(
                "torch sees no GPU here. To train on the CPU, pass `use_cpu=True` (`--use_cpu`). If this machine has a GPU, install "
                "its driver and a build of torch for it."
            )
        has_default = self.accelerator_config is None
        super().__post_init__()
        if has_default and not isinstance(self.accelerator_config, str | dict | None):
            # Batches are copied beside the work. Apple's GPUs would read memory that is not pinned, and already freed.
            is_safe = self.dataloader_pin_memory and self.device.type in COPIES_WITHOUT_SYNC
            self.accelerator_config.non_blocking = is_safe
        if secrets := [name for name in self.target_model_init_kwargs or () if name.endswith("token")]:
            raise ValueError(
                f"Arguments are saved beside the draft and published with it: leave {secrets} out of "
                "`target_model_init_kwargs`. Log in by `hf auth login` or the environment variable HF_TOKEN instead."
            )
        self._check_values()
        self._check_optimizer()
        self._check_without_effect()

    def _check_numbers(self) -> None:
        # Not the types of the fields, from which transformers' parser removes `None`.
        of_classes = map(inspect.get_annotations, reversed(type(self).__mro__))
        types = {name: kind for of_class in of_classes for name, kind in of_class.items()}
        for each in fields(self):
            value, kind, kinds = getattr(self, each.name), types[each.name], {int: Integral, float: Real}
            if kind in kinds and value != each.default and not isinstance(value, kinds[kind]):
                number = "an integer" if kind is int else "a number"
                hint = " YAML reads 1e-4 as a text: write 1.0e-4." if isinstance(value, str) else ""
                raise ValueError(f"`{each.name}` is {value!r}, but must be {number}.{hint}")
        names = ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size")
        check_integers(self, **dict.fromkeys(names, 1))

    def _check_values(self) -> None:
        for name in ("dataset_kwargs", "lr_scheduler_kwargs", "model_init_kwargs", "target_model_init_kwargs"):
            # transformers reads only texts that begin with {
            if not isinstance(value := getattr(self, name), dict | None):
                raise ValueError(f"`{name}` must be a dictionary, or the JSON text of one, got {value!r}.")
        if ignored := sorted(set(self.dataset_kwargs or ()) - {"skip_prepare_dataset"}):
            raise ValueError(
                f"`dataset_kwargs` has {ignored}, which would have no effect. Its only key is `skip_prepare_dataset`."
            )
        check_integers(self, ttt_steps=1, num_eval_prompts=0, eval_max_new_tokens=1, dataloader_num_workers=0)
        if self.learning_rate < 0:
            raise ValueError(f"`learning_rate` must not be negative, got {self.learning_rate}.")
        # A row of three tokens has one whose state is read, the next one, and the one that both predict.
        for name, least in {"draft_vocab_size": 1, "sampled_vocab_size": 1, "max_length": 3}.items():
            if getattr(self, name) is not None:
                check_integers(self, **{name: least})
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError(
                f"`max_steps` is {self.max_steps} and `num_train_epochs` {self.num_train_epochs}, so nothing would be trained. Raise one."
            )
        check_shares(self, "ttt_warmup")
        check_shares(self, "ttt_step_decay", "ttt_row_share", above_zero=True)
        if self.packing and self.max_length is None:  # TRL would say so after all rows are tokenized
            raise ValueError("`packing=True` fills rows of `max_length` tokens, which is None. Pass a `max_length`.")
        if self.packing and self.truncation_mode == "keep_end":
            raise ValueError(
                "`truncation_mode='keep_end'` has no effect on packed rows, which keep the beginnings of texts. Leave it out, or `packing`."
            )
        if self.eval_packing and not (self.packing or self.padding_free):
            raise ValueError(
                "`eval_packing=True` needs `packing=True`: other batches are padded, and the documents of a row would read each other."
            )
        get_reporting_integration_callbacks(self.report_to)  # raises an error for an unknown name
        # `Trainer` would say so after all rows are tokenized. Transformers does not find the first four everywhere, such as Comet without
        # a key, which works offline. It imports those that it finds.
        found = get_available_reporting_integrations() if self.report_to else []
        known = ["azure_ml", "comet_ml", "flyte", "kubeflow", *found]
        if missing := [name for name in self.report_to or () if name not in known]:
            raise ValueError(
                f"`report_to` has {missing}, which are not installed. Install them (pip install {' '.join(missing)}), or leave them out."
            )
        if self.draft_form not in FORMS:
            raise ValueError(f"`draft_form` must be one of {list(FORMS)}, got {self.draft_form!r}.")

    def _check_optimizer(self) -> None:
        if not self.use_muon:
            return
        for name in ("optim", "optim_args", "optim_target_modules"):
            if getattr(self, name) not in (None, "", getattr(type(self), name)):
                raise ValueError(f"`{name}` has no effect where Muon and AdamW train. Pass `use_muon=False` with it.")

    def _check_without_effect(self) -> None:
        unused = {
            "label_smoothing_factor": 0,
            "loss_type": "nll",
            "neftune_noise_alpha": None,
            "use_liger_kernel": False,
        }
        for name, default in unused.items():
            if getattr(self, name) != default:
                raise ValueError(f"`{name}` has no effect on training-time test. Leave it out.")
        if self.fp16 and self.device.type == "cpu":  # accelerate would train in float32 in silence
            raise ValueError("`fp16=True` has no effect on a CPU. Run where torch sees a GPU, or leave `fp16` out.")
        if self.activation_offloading and self.use_cpu:
            raise ValueError(
                "`activation_offloading` moves activations from a GPU to the CPU, where they are already. Leave it out."
            )
        if self.gradient_checkpointing:
            raise ValueError(
                "`gradient_checkpointing=True` (or `activation_checkpointing`) is not supported: training-time test keeps the keys of every step, and a "
                "recomputed forward would add them twice. A draft is one layer: lower `max_length` or the batch size instead."
            )
