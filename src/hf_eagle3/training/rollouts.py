"""A draft for the rollouts of a trainer that generates with transformers (TRL's `GRPOTrainer`, `RLOOTrainer`, ...)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

from ..assisting import assist
from ..remote_code.outputs_eagle3 import aux_hidden_states, select_hidden_states
from .features import TargetStates
from .losses import LossType
from .models import without_adapter
from .ttt import TTTBatch, draft_loss


@contextmanager
def assist_rollouts(
    trainer: Trainer,
    draft,
    learning_rate: float | None = None,
    ttt_steps: int = 3,
    ttt_step_decay: float = 0.8,
    loss_type: LossType = "kl",
) -> Iterator[None]:
    """
    Within it the texts that a trainer generates are assisted by a draft, and `acceptance_length` is in its logs. The
    texts, and so rewards and losses, are what they would be.

    ```py
    trainer = GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=dataset)
    with assist_rollouts(trainer, draft, learning_rate=1e-4):
        trainer.train()
    draft.save_pretrained("my-draft")
    ```

    The draft fits the target that it was trained for, which goes on changing here. With a `learning_rate` the draft
    follows: whenever the trainer reads a batch to learn from it, the draft takes a step of its own on the states that
    the target then has, and `draft_loss` is in the logs.

    Args:
        trainer (`Trainer`): Of which `model` generates.
        draft ([`Eagle3ForSpeculation`]): Moved to the device of the model.
        learning_rate (`float`, *optional*): Of AdamW, for the draft. `None` leaves it as it is.
        ttt_steps (`int`, *optional*, defaults to 3): How many drafting steps are unrolled.
        ttt_step_decay (`float`, *optional*, defaults to 0.8): Weight of each step's loss relative to the one before.
        loss_type (`str`, *optional*, defaults to `"kl"`): See [`Eagle3TrainingArguments`].

    Raises:
        ValueError: if the draft is not for this model, the trainer does not call `generate`, or several processes would
            each train a draft of their own.
    """
    for name in ("use_vllm", "use_transformers_paged"):
        if getattr(trainer.args, name, False):
            raise ValueError(f"With `{name}=True` the trainer does not call `generate`, and no draft can assist it.")
    model = trainer.model
    target = without_adapter(model)
    draft.to(target.device)
    callback = RolloutCallback(draft)
    with ExitStack() as stack:
        stack.enter_context(assist(target, draft))
        if learning_rate is not None:
            if trainer.accelerator.num_processes > 1:
                raise ValueError(
                    "A draft follows the target in one process only: leave `learning_rate` out, and train the draft again "
                    "after this."
                )
            callback.learner = DraftLearner(target, draft, learning_rate, ttt_steps, ttt_step_decay, loss_type)
            stack.enter_context(callback.learner.listening())
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callback)  # before those that report logs elsewhere
        stack.callback(callbacks.remove, callback)
        yield


class RolloutCallback(TrainerCallback):
    """Logs how drafting goes."""

    def __init__(self, draft):
        self.draft, self.learner, self.last, self.lengths = draft, None, draft.last_generation, []

    def on_step_end(self, args, state, control, **kwargs):
        if self.draft.last_generation is not self.last:  # the texts of a rollout may be learned from in several steps
            self.last = self.draft.last_generation
            self.lengths += self.last.accepted_lengths

    def on_log(self, args, state, control, logs=None, **kwargs):
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
    """
    Trains a draft on what a target computes anyway.

    Args:
        target (`PreTrainedModel`), draft, learning_rate, ttt_steps, ttt_step_decay, loss_type: See [`assist_rollouts`].
    """

    def __init__(self, target: PreTrainedModel, draft, learning_rate, ttt_steps, ttt_step_decay, loss_type):
        self.draft, self.ttt_steps, self.ttt_step_decay, self.loss_type = draft, ttt_steps, ttt_step_decay, loss_type
        draft.borrow_embeddings(target)
        self.layer_ids = draft.resolve_aux_layer_ids(target)
        self.target_states = TargetStates(target, self.layer_ids)
        self.weights = [weight for weight in draft.parameters() if weight.requires_grad]
        # What is trained: half precision would swallow small updates.
        self.masters = [
            weight if weight.dtype == torch.float else weight.detach().float().requires_grad_()
            for weight in self.weights
        ]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0)
        self.losses: list[float] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it each forward of the target with gradients is learned from."""
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

    def ask_for_states(self, module, args, kwargs):
        if not torch.is_grad_enabled():
            return None
        if kwargs.get("input_ids") is None:
            raise ValueError(
                "The trainer reads embeddings in place of `input_ids`, from which a draft cannot learn: leave "
                "`learning_rate` out."
            )
        return args, kwargs | {"output_hidden_states": select_hidden_states(self.layer_ids)}

    def learn(self, module, args, kwargs, outputs):
        if not torch.is_grad_enabled():
            return
        batch = self.batch_of(kwargs, outputs)
        self.draft.train()
        result = draft_loss(self.draft, batch, self.ttt_steps, self.loss_type)
        weights = self.ttt_step_decay ** torch.arange(self.ttt_steps, device=result.num_rows.device)
        loss = (weights * result.loss_sums / result.num_rows.clamp(min=1)).sum()
        loss.backward(inputs=self.weights)  # none for the target, whose table of embeddings the draft reads
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
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
    def batch_of(self, inputs, outputs) -> TTTBatch:
        """What the target said about a batch."""
        input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        head = self.draft.get_output_embeddings().weight
        aux = aux_hidden_states(outputs, self.layer_ids, self.target_states.num_layers)
        distributions = self.target_states.distributions(outputs.last_hidden_state, self.draft.draft_token_ids)
        labels = input_ids if mask is None else input_ids.masked_fill(mask == 0, -100)
        return TTTBatch.of(inputs, aux.to(head), distributions, labels)
