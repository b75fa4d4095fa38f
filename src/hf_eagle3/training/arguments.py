"""Arguments of [`Eagle3Trainer`]."""

import copy
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from trl import SFTConfig

from ..making import FORMS
from .losses import LOSS_TYPES, LossType


def as_json(value: Any) -> Any:
    """A value of arguments as what JSON has: trackers write arguments at the first log."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(getattr(value, "to_dict", None)):
        return as_json(value.to_dict())
    if is_dataclass(value):
        return as_json(vars(value))
    return str(value).removeprefix("torch.")


@dataclass
class Eagle3TrainingArguments(SFTConfig):
    r"""
    Configuration of [`Eagle3Trainer`]: an [`~trl.SFTConfig`] (data preparation, chat templates, assistant-only loss,
    packing, logging, checkpoints) and what training-time test adds.

    Of the packing strategies, `"bfd"` (the default) and `"bfd_split"` keep documents apart: neither attention nor the
    unroll nor the loss crosses their boundaries. `"wrapped"` forgets where they are; it is for running text.

    Args:
        target_model_init_kwargs (`dict`, *optional*):
            Arguments of `from_pretrained` for a target that the trainer loads itself, by its name; `dtype` defaults to
            `"auto"`.
        model_init_kwargs (`dict`, *optional*):
            Arguments of [`Eagle3ForSpeculation.from_target`] for the draft that the trainer makes itself
            (`model=None`).
        draft_form (`str`, *optional*, defaults to `"eagle3.1"`):
            Of the draft that the trainer makes itself: `"eagle3.1"`, or `"classic"` for that of the EAGLE-3 paper, which
            accepts less and is what most engines take, or `"p-eagle"`, which drafts all tokens in one pass.
            `model_init_kwargs` come on top.
        draft_vocab_size (`int`, *optional*):
            Size of the draft vocabulary that the trainer takes from the training data when it makes the draft itself
            (`model=None`). Defaults to the target's whole vocabulary.
        assistant_confidence_threshold (`float`, *optional*):
            Saved in the draft's generation config: nodes that it finds less probable, path included, are not verified.
            The probabilities of a trained draft say which nodes are worth their place; those of an untrained one do
            not, so that a fresh draft has 0. Defaults to what the draft has, or 0.02 if that is 0.
        ttt_steps (`int`, *optional*, defaults to `7`):
            Drafting steps unrolled in training.
        ttt_warmup (`float`, *optional*, defaults to `0.8`):
            Share of training in which the unroll grows from one step to `ttt_steps`. A step less deep is a step sooner
            done, and a draft has to predict one token well before it can predict several. The logged loss, a sum over
            the steps, rises with each step that comes in; `accuracy_0` and the evaluation, which always takes all
            steps, tell how it goes. 0 unrolls all steps from the beginning, as the EAGLE-3 paper does.
        ttt_step_decay (`float`, *optional*, defaults to `0.8`):
            Weight of step `s` in the loss is `ttt_step_decay ** s`.
        ttt_row_share (`float`, *optional*, defaults to `1.0`):
            Share of the rows of each drafting step that the next one goes on with, drawn at random: step `s` computes
            `ttt_row_share ** s` of them, and its loss stands for all. Below 1 training sees more tokens in the same time,
            and less of the later steps.
        sampled_vocab_size (`int`, *optional*):
            How many of the tokens that the target finds improbable everywhere in a batch (below 1%) its loss takes, drawn at
            random, each of which stands for as many as there are beside them (sampled softmax,
            https://huggingface.co/papers/1412.2007); beside all that are probable somewhere. With a large draft vocabulary
            that is most of the time and memory of a drafting step. For `loss_type="kl"`, and not under FSDP or DeepSpeed. By
            default all tokens.
        loss_type (`str`, *optional*, defaults to `"kl"`):
            `"kl"` (forward KL), `"ce"`, `"lk_alpha"`, `"lk_lambda"` or `"race"`: see `hf_eagle3.training.losses`.
        echo_factor (`int`, *optional*, defaults to `1`):
            How often each batch is learned from, by states that the target computes once (data echoing,
            https://huggingface.co/papers/1907.05550). An epoch takes so many times the steps. Where the target is large,
            most of a step is its forward. Not for streams, stored features, and targets that processes share.
        echo_buffer_size (`int`, *optional*, defaults to `16`):
            How many batches come, in each process, before the first of them comes again. Until then their states are in the
            host's memory: as many numbers a token as [`Eagle3Trainer.extract_features`] stores.
        rollout_share (`float`, *optional*, defaults to `0.0`):
            Share of the batches, from `rollout_start` on, that are not data but rollouts: beginnings of the training data,
            continued by the target with the draft as it is then. The draft learns from them as from data, and from what
            the target says about nodes of the trees that it rejected (Draft-OPD,
            https://huggingface.co/papers/2605.29343).
        rollout_start (`float`, *optional*, defaults to `0.5`):
            Share of training after which rollouts begin.
        rollout_interval (`int`, *optional*, defaults to `16`):
            Optimizer steps for which batches are rolled out at once. More are written faster, and by an older draft.
        rollout_batch_size (`int`, *optional*, defaults to `64`):
            Texts that are rolled out in one call of `generate`, at most: as many as memory has room for.
        rollout_temperature (`float`, *optional*, defaults to `1.0`):
            Of sampling in rollouts; 0 for greedy texts.
        rollout_max_new_tokens (`int`, *optional*, defaults to `128`):
            Tokens that each continuation has. Prompts are cut to what `max_length` leaves.
        rollout_rejected_weight (`float`, *optional*, defaults to `1.0`):
            What rejected nodes count, times the target's probability of the path to them; 0 leaves them out.
        num_eval_prompts (`int`, *optional*, defaults to `16`):
            With how many beginnings of evaluation rows `evaluate` decodes, to measure the acceptance length itself. 0
            for none.
        eval_max_new_tokens (`int`, *optional*, defaults to `64`):
            How many tokens it decodes from each.
        use_muon (`bool`, *optional*, defaults to `True`):
            Whether matrices other than `lm_head` are trained by Muon and the rest by AdamW, instead of everything by
            `optim`. Needs torch 2.9.
        adamw_learning_rate (`float`, *optional*):
            Learning rate of what AdamW trains beside Muon. Defaults to a fifth of `learning_rate`: the head begins as
            the target's own, and large steps make it forget that.
        learning_rate (`float`, *optional*, defaults to `1e-3`):
            The peak learning rate.
        lr_scheduler_type (`str`, *optional*, defaults to `"cosine"`):
            Its schedule.
        adam_beta2 (`float`, *optional*, defaults to `0.95`), max_grad_norm (`float`, *optional*, defaults to `0.5`):
            The second beta of AdamW, and the norm that gradients are clipped to.
        gradient_checkpointing (`bool`, *optional*):
            Not supported: the unroll keeps the keys of every step.
    """

    _VALID_DICT_FIELDS = SFTConfig._VALID_DICT_FIELDS + ["target_model_init_kwargs"]

    # Parameters whose default values are overridden from SFTConfig
    learning_rate: float = field(default=1e-3, metadata={"help": "The peak learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "The second beta of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "The learning-rate schedule."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Norm the gradients are clipped to."})
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "Not supported: the unroll keeps the keys of every step."}
    )

    # Parameters that control the target and the draft
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of `from_pretrained` for a target that is given by its name."}
    )
    draft_form: str = field(
        default="eagle3.1",
        metadata={
            "help": "Form of a fresh draft: `eagle3.1`, `classic`, which accepts less and is what most engines take, or `p-eagle`, "
            "which drafts all tokens in one pass.",
            "choices": list(FORMS),
        },
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Size of the draft vocabulary taken from the training data when the trainer makes the draft."
        },
    )

    assistant_confidence_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Saved in the draft's generation config: nodes that it finds less probable are not verified."
        },
    )

    # Parameters that control training-time test
    ttt_steps: int = field(default=7, metadata={"help": "Drafting steps unrolled in training."})
    ttt_warmup: float = field(
        default=0.8, metadata={"help": "Share of training in which the unroll grows from one step to `ttt_steps`."}
    )
    ttt_step_decay: float = field(
        default=0.8, metadata={"help": "Weight of step `s` in the loss is `ttt_step_decay ** s`."}
    )
    ttt_row_share: float = field(
        default=1.0, metadata={"help": "Share of the rows of each drafting step that the next one goes on with."}
    )
    sampled_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "How many improbable tokens the loss takes, at random, in place of the whole draft vocabulary."
        },
    )
    loss_type: LossType = field(
        default="kl",
        metadata={"help": "`kl`, `ce`, `lk_alpha`, `lk_lambda` or `race`.", "choices": list(LOSS_TYPES)},
    )
    use_muon: bool = field(
        default=True,
        metadata={"help": "Train matrices by Muon and the rest by AdamW, instead of everything by `optim`."},
    )

    adamw_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of what AdamW trains beside Muon; by default a fifth of `learning_rate`."},
    )

    # Parameters that control how often the target reads
    echo_factor: int = field(
        default=1,
        metadata={"help": "How often each batch is learned from, by states that the target computes once."},
    )
    echo_buffer_size: int = field(
        default=16, metadata={"help": "Batches of which states are kept, until the first of them comes again."}
    )

    # Parameters that control on-policy distillation
    rollout_share: float = field(
        default=0.0, metadata={"help": "Share of the batches that the target and the draft write themselves."}
    )
    rollout_start: float = field(default=0.5, metadata={"help": "Share of training after which these rollouts begin."})
    rollout_interval: int = field(
        default=16, metadata={"help": "Optimizer steps for which batches are rolled out at once."}
    )
    rollout_batch_size: int = field(
        default=64, metadata={"help": "Texts that are rolled out in one call of `generate`, at most."}
    )
    rollout_temperature: float = field(default=1.0, metadata={"help": "Of sampling in rollouts; 0 for greedy texts."})
    rollout_max_new_tokens: int = field(
        default=128, metadata={"help": "Tokens that each continuation in a rollout has."}
    )
    rollout_rejected_weight: float = field(
        default=1.0,
        metadata={"help": "What rejected nodes count, times the target's probability of the path to them."},
    )

    # Parameters that control evaluation
    num_eval_prompts: int = field(
        default=16, metadata={"help": "Prompts decoded by `evaluate` to measure the acceptance length; 0 for none."}
    )
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Tokens decoded from each of them."})

    def __getstate__(self):
        """`Trainer` pickles its arguments beside the weights, and pushes both: the token stays here."""
        return {**self.__dict__, "hub_token": None}

    def __copy__(self):
        """Which would leave the token behind, too."""
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        return copied

    def to_dict(self):
        """With arguments of `from_pretrained` that are objects (quantization, dtypes, devices) as what JSON has."""
        plain = copy.copy(self)  # `TrainingArguments` writes into dictionaries
        for name in ("model_init_kwargs", "target_model_init_kwargs"):
            setattr(plain, name, as_json(getattr(self, name)))
        return super(Eagle3TrainingArguments, plain).to_dict()

    def __post_init__(self):
        if self.bf16 is None and self.use_cpu and not torch.cpu._is_avx512_bf16_supported():
            self.bf16 = False  # elsewhere TRL's default, which such processors compute in software
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith("loss_per_step"):
            self.greater_is_better = False  # transformers knows losses by how their names end
        super().__post_init__()
        if secrets := [name for name in self.target_model_init_kwargs or () if name.endswith("token")]:
            raise ValueError(
                f"Arguments are saved beside the draft, and published with it: leave {secrets} out of "
                "`target_model_init_kwargs`, and log in by `hf auth login` or the environment variable HF_TOKEN."
            )
        for name, least in (
            ("ttt_steps", 1),
            ("draft_vocab_size", 1),
            ("sampled_vocab_size", 1),
            ("max_length", 3),  # a token whose state is read, the next, and what these predict
            ("num_eval_prompts", 0),
            ("eval_max_new_tokens", 1),
            ("echo_factor", 1),
            ("echo_buffer_size", 1),
            ("rollout_batch_size", 1),
            ("rollout_interval", 1),
            ("rollout_max_new_tokens", 1),
        ):
            value = getattr(self, name)
            may_be_none = name in ("draft_vocab_size", "sampled_vocab_size", "max_length")
            if not (value is None and may_be_none) and (type(value) is not int or value < least):
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        threshold = self.assistant_confidence_threshold
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"`assistant_confidence_threshold` must be in [0, 1), got {threshold}.")
        for name in ("ttt_warmup", "rollout_share", "rollout_start"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be in [0, 1], got {getattr(self, name)}.")
        for name in ("rollout_temperature", "rollout_rejected_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}.")
        if self.rollout_share > 0 and self.max_length is not None and self.rollout_max_new_tokens >= self.max_length:
            raise ValueError(
                f"`rollout_max_new_tokens` is {self.rollout_max_new_tokens}, which leaves no room for prompts within "
                f"`max_length={self.max_length}`."
            )
        if self.echo_factor > 1 and self.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "`train_sampling_strategy='batch_rebalance'` makes batches that do not come again (`echo_factor`)."
            )
        for name in ("ttt_step_decay", "ttt_row_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"`{name}` must be in (0, 1], got {getattr(self, name)}.")
        if self.draft_form not in FORMS:
            raise ValueError(f"`draft_form` must be one of {list(FORMS)}, got {self.draft_form!r}.")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"`loss_type` must be one of {LOSS_TYPES}, got {self.loss_type!r}.")
        if self.sampled_vocab_size is not None and self.loss_type != "kl":
            raise ValueError(f"`sampled_vocab_size` is for the loss 'kl', not {self.loss_type!r}.")
        if self.use_muon and self.optim != type(self).optim:
            raise ValueError("`optim` has no effect where Muon and AdamW train. Pass `use_muon=False` with it.")
        if self.use_muon and not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"torch {torch.__version__} has no Muon (2.9 does). Pass `use_muon=False`, or install another."
            )
        if self.adamw_learning_rate is not None and not self.use_muon:
            raise ValueError(
                "`adamw_learning_rate` is for what AdamW trains beside Muon. Without Muon pass `learning_rate`."
            )
        for name, default in (("label_smoothing_factor", 0), ("neftune_noise_alpha", None)):
            if getattr(self, name) != default:
                raise ValueError(f"`{name}` has no effect on training-time test. Leave it out.")
        if self.use_muon and self.optim_args:
            raise ValueError("`optim_args` has no effect where Muon and AdamW train. Pass `use_muon=False` with it.")
        if self.activation_offloading and self.use_cpu:
            raise ValueError(
                "`activation_offloading` moves activations from a GPU to the CPU, where they are already."
            )
        if self.gradient_checkpointing:
            raise ValueError(
                "`gradient_checkpointing=True` is not supported: training-time test keeps the keys of every step, which "
                "a recomputed forward would add twice. A draft is one layer; lower `max_length` or the batch size."
            )
