"""A draft for the rollouts of a trainer that generates with transformers (TRL's `GRPOTrainer`, `RLOOTrainer`, ...)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.utils import ModelOutput, logging

from ..assisting import assist
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.outputs_eagle3 import TOKEN_TYPES, aux_hidden_states, select_hidden_states
from .models import check_layers, check_steps, check_vocabulary, without_adapter
from .target_states import TargetStates
from .ttt import TTTBatch, draft_loss, num_counted


logger = logging.get_logger(__name__)


@contextmanager
def assist_rollouts(
    trainer: Trainer,
    draft: DraftModel,
    learning_rate: float | None = None,
    ttt_steps: int = 3,
    ttt_step_decay: float = 0.8,
) -> Iterator[None]:
    """
    Lets a draft assist a trainer's calls of `generate`, and adds `acceptance_length` to its logs. In float32 texts, rewards
    and losses are the same as without the draft.

    ```py
    trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset)
    with assist_rollouts(trainer, draft, learning_rate=1e-3):
        trainer.train()
    draft.save_pretrained("my-draft")
    ```

    The trainer changes the target that the draft was trained for. With a `learning_rate` the draft follows: for each
    batch that the trainer learns from, the draft takes a step of its own on the target's states of that forward. The logs
    then have `draft_loss`. Batches in which gradients are not finite are left out, with a warning.

    Args:
        trainer (`Trainer`): A trainer whose `model` generates.
        draft ([`Eagle3ForSpeculation`]): The draft. It is moved to the device of the model.
        learning_rate (`float`, *optional*): The draft's learning rate, for AdamW. `None` does not train the draft.
        ttt_steps (`int`, *optional*, defaults to 3): The number of drafting steps in the unroll.
        ttt_step_decay (`float`, *optional*, defaults to 0.8): The weight of each step's loss relative to the one before.

    Raises:
        ValueError: if the draft is for another model or cannot be trained on so many `ttt_steps`, the trainer does not call
            `generate`, or several processes would each train a draft of their own.
    """
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(trainer.args, name, False):
            raise ValueError(
                f"With `{name}=True` the trainer does not call `generate`, so no draft can assist it. Leave `{name}` out."
            )
    model = trainer.model
    target = without_adapter(model)
    draft.to(target.device)
    callback = RolloutCallback(draft)
    with ExitStack() as stack:
        stack.enter_context(assist(target, draft))
        if learning_rate is not None:
            if trainer.accelerator.num_processes > 1:
                raise ValueError(
                    "A draft can follow the target in one process only. Leave `learning_rate` out, and train it afterwards."
                )
            callback.learner = DraftLearner(target, draft, learning_rate, ttt_steps, ttt_step_decay)
            stack.enter_context(callback.learner.listening())
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callback)  # before those that report logs elsewhere
        stack.callback(callbacks.remove, callback)
        yield


class RolloutCallback(TrainerCallback):
    """Logs the acceptance length and the loss of a draft."""

    def __init__(self, draft: DraftModel):
        self.draft, self.last = draft, draft.last_generation
        self.lengths: list[int] = []
        self.learner: DraftLearner | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = self.draft.last_generation
        if last is not None and last is not self.last:  # several steps may learn from one rollout
            self.last = last
            self.lengths += last.accepted_lengths

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        new = {}
        if self.lengths:
            new["acceptance_length"] = sum(self.lengths) / len(self.lengths)
        if self.learner is not None and self.learner.losses:
            new["draft_loss"] = sum(self.learner.losses) / len(self.learner.losses)
            self.learner.losses = []
        self.lengths = []
        for entry in (logs, *state.log_history[-1:]):
            entry.update(new)


class DraftLearner:
    """Trains a draft on the forwards of a target that learns. For the arguments see [`assist_rollouts`]."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DraftModel,
        learning_rate: float,
        ttt_steps: int,
        ttt_step_decay: float,
    ):
        self.draft, self.ttt_steps, self.ttt_step_decay = draft, ttt_steps, ttt_step_decay
        check_layers(draft)
        check_vocabulary(draft, target)
        check_steps(draft, ttt_steps)
        draft.borrow_embeddings(target)
        self.layer_ids = draft.resolve_aux_layer_ids(target)
        self.target_states = TargetStates(target, self.layer_ids)
        for name in draft.frozen_modules:
            if getattr(draft, name, None) is not None:
                getattr(draft, name).requires_grad_(False)
        self.weights = [weight for weight in draft.parameters() if weight.requires_grad]
        # Copies in float32 are trained, because half precision would lose small updates.
        self.masters = [
            weight if weight.dtype == torch.float else weight.detach().float().requires_grad_()
            for weight in self.weights
        ]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0)
        self.losses: list[float] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Learns from each forward of the target with gradients, for a while."""
        base_model = self.target_states.base_model
        handles = [
            base_model.register_forward_pre_hook(self.ask_for_states, with_kwargs=True),
            base_model.register_forward_hook(self.learn, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def ask_for_states(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        if not torch.is_grad_enabled():
            return None
        if kwargs.get("input_ids") is None:
            raise ValueError(
                "No draft learns from the trainer's embeddings in place of `input_ids`. Leave `learning_rate` out."
            )
        return args, kwargs | {"output_hidden_states": select_hidden_states(self.layer_ids)}

    def learn(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], outputs: ModelOutput) -> None:
        if not torch.is_grad_enabled():
            return
        batch = self.batch_of(kwargs, outputs)
        self.draft.train()
        result = draft_loss(self.draft, batch, self.ttt_steps)
        # Not the mean over its own rows: a block draft draws some of the rows, whose loss stands for all.
        loss = result.loss(self.ttt_step_decay, num_counted(batch.labels, batch.documents, self.ttt_steps))
        loss.backward(inputs=self.weights)  # the draft reads the target's embedding table
        is_finite = torch.nn.utils.clip_grad_norm_(self.weights, 1.0).isfinite()
        if not is_finite:  # a step would make all weights NaN
            for weight in self.weights:
                weight.grad = None
            self.draft.eval()
            logger.warning_once(
                "The draft does not learn from batches in which its gradients are not finite, and this is one. If the trainer's own loss "
                "is finite, load the model in bfloat16 or float32, or pass a lower `learning_rate`."
            )
            return
        halves = [pair for pair in zip(self.weights, self.masters) if pair[0] is not pair[1]]
        for weight, master in halves:
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in halves:
                weight.copy_(master)
        self.draft.eval()
        self.losses.append(loss.item())

    @torch.no_grad()
    def batch_of(self, inputs: dict[str, Any], outputs: ModelOutput) -> TTTBatch:
        """Returns what the target computed for a batch."""
        input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        head = self.draft.get_output_embeddings().weight
        aux = aux_hidden_states(outputs, self.layer_ids, self.target_states.num_layers)
        distributions = self.target_states.distributions(outputs.last_hidden_state, self.draft.draft_token_ids)
        labels = input_ids if mask is None else input_ids.masked_fill(mask == 0, -100)
        for kinds in (inputs[name] for name in TOKEN_TYPES if inputs.get(name) is not None):
            labels = labels.masked_fill(kinds != 0, -100)  # of images
        return TTTBatch.of(inputs, aux.to(head), distributions, labels)
