"""[`Eagle3Trainer`]: TRL's `SFTTrainer`, training a draft by training-time test."""

from pathlib import Path
from types import MethodType

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel
from trl import SFTTrainer

from ..data import most_frequent_tokens
from ..modeling_eagle3 import Eagle3ForSpeculation
from ..outputs_eagle3 import aux_hidden_states, select_hidden_states
from .arguments import Eagle3TrainingArguments
from .optimizer import MuonWithAdamW
from .ttt import TTTBatch, TTTOutput, counted_rows, documents_of, ttt_loss


logger = get_logger(__name__)

CARD = """---
library_name: transformers
{base_model}tags:
- eagle3
- speculative-decoding
- assistant-model
---

# {name}

An EAGLE-3 draft for {verifier}, trained with hf-eagle3. It makes `generate` faster and leaves the text as it is:

```python
from transformers import AutoModel

draft = AutoModel.from_pretrained("{name}", trust_remote_code=True)
target.generate(**inputs, assistant_model=draft)
```
"""


class Eagle3Trainer(SFTTrainer):
    r"""
    Trains an EAGLE-3 draft for a frozen target that runs in the same process.

    Data sets are those of [`~trl.SFTTrainer`]: `text`, `messages` (with `assistant_only_loss=True` only the assistant's
    tokens are learned) or `prompt` and `completion`.

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
        model ([`Eagle3ForSpeculation`] or `PeftModel`, *optional*):
            The draft to train. `None` makes one by [`Eagle3ForSpeculation.from_target`], with the `draft_vocab_size` most
            frequent supervised tokens of `train_dataset`. Drafts in half precision are trained, and saved, in float32.
        target_model (`PreTrainedModel`):
            The frozen target. It may be quantized or spread by a `device_map`; it is not trained and not saved.
        args ([`Eagle3TrainingArguments`]):
            Arguments.
        kwargs (*optional*):
            All others of [`~trl.SFTTrainer`].
    """

    _tag_names = ["eagle3", "speculative-decoding"]
    _name = "EAGLE-3"
    # `compute_loss` divides by the rows of the whole optimizer step.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Eagle3ForSpeculation | None,
        target_model: PreTrainedModel,
        args: Eagle3TrainingArguments,
        **kwargs,
    ):
        if not isinstance(args, Eagle3TrainingArguments):
            raise TypeError(f"`args` must be `Eagle3TrainingArguments`, got {type(args).__name__}.")
        if kwargs.get("processing_class") is None:
            raise ValueError("`Eagle3Trainer` needs the target's tokenizer as `processing_class`.")
        takes_vocabulary_from_data = model is None and args.draft_vocab_size is not None
        if model is None:
            torch.manual_seed(args.seed)
            model = Eagle3ForSpeculation.from_target(target_model, **(args.model_init_kwargs or {}))
        elif args.model_init_kwargs:
            raise ValueError("`model_init_kwargs` are for the draft that `model=None` makes. Leave one of them out.")
        elif args.draft_vocab_size not in (None, model.config.draft_vocab_size):
            raise ValueError(
                f"`draft_vocab_size` is {args.draft_vocab_size}, but the draft has a vocabulary of "
                f"{model.config.draft_vocab_size}. Leave one of `model` and `draft_vocab_size` out."
            )
        model.validate_target(target_model)
        if set(model.config.transformer_layer_config.layer_types) != {"full_attention"}:
            raise ValueError(
                "`Eagle3Trainer` trains drafts with full attention; this one has layers "
                f"{model.config.transformer_layer_config.layer_types}, whose window training-time test would ignore."
            )
        # Half precision swallows small updates; autocast (`bf16=True`) computes in it all the same.
        model.float()
        target_model.eval().requires_grad_(False)

        model_init_kwargs, args.model_init_kwargs = args.model_init_kwargs, None  # done with; TRL would warn of it
        super().__init__(model=model, args=args, **kwargs)
        args.model_init_kwargs = model_init_kwargs

        draft = self.draft
        if takes_vocabulary_from_data:
            token_ids, coverage = most_frequent_tokens(
                self.train_dataset, args.draft_vocab_size, draft.config.vocab_size
            )
            draft.set_draft_vocabulary(token_ids, target_model)
            logger.info(
                f"Draft vocabulary: {len(token_ids)} of {draft.config.vocab_size} tokens, which make up {coverage:.1%} of "
                "the supervised tokens."
            )
        if getattr(target_model, "hf_device_map", None) is None:
            target_model.to(self.accelerator.device)
        self.target_model = target_model
        draft.borrow_embeddings(target_model)
        draft.generation_config.assistant_confidence_threshold = args.assistant_confidence_threshold
        self.aux_layer_ids = draft.resolve_aux_layer_ids(target_model)
        # One forward of the wrapped model is one unroll, so that DDP, FSDP and autocast do what they do around a
        # forward. Replaces the fused loss that `SFTTrainer` puts in the same place.
        draft.forward = MethodType(_forward_or_unroll, draft)
        self._counts: dict[str, torch.Tensor] = {}

    @property
    def draft(self) -> Eagle3ForSpeculation:
        """The draft itself, without PEFT's or accelerate's wrappers."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @torch.no_grad()
    def target_features(self, inputs: dict[str, torch.Tensor]) -> TTTBatch:
        """Runs the target on a collated batch. Its own head gives the logits, with whatever it does to them."""
        known = {key: inputs[key] for key in ("input_ids", "attention_mask", "position_ids") if key in inputs}
        outputs = self.target_model(
            **known, output_hidden_states=select_hidden_states(self.aux_layer_ids), use_cache=False
        )
        num_layers = self.target_model.config.get_text_config(decoder=True).num_hidden_layers
        input_ids, device = inputs["input_ids"], inputs["input_ids"].device
        position_ids = inputs.get("position_ids")
        logits = outputs.logits.to(device)
        return TTTBatch(
            input_ids=input_ids,
            aux_hidden_states=aux_hidden_states(outputs, self.aux_layer_ids, num_layers).to(device).float(),
            target_logits=logits if self.draft.d2t is None else logits[..., self.draft.draft_token_ids],
            target_tokens=logits.max(dim=-1).indices,  # argmax is slow in bfloat16
            labels=inputs["labels"],
            documents=documents_of(input_ids, inputs.get("attention_mask"), position_ids),
            position_ids=torch.arange(input_ids.shape[1], device=device).expand_as(input_ids)
            if position_ids is None
            else position_ids,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch, steps = self.target_features(inputs), self.args.ttt_steps
        outputs: TTTOutput = model(unroll=lambda draft: ttt_loss(draft, batch, steps))
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
        counts = torch.stack([outputs.num_correct, outputs.num_rows]).double()
        self._counts[mode] = self._counts.get(mode, 0) + counts
        return (loss, {"loss": loss}) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        if not self.args.use_muon or self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*args, **kwargs)
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        matrices = [weight for name, weight in trained if weight.dim() == 2 and "lm_head" not in name]
        others = [weight for name, weight in trained if weight.dim() != 2 or "lm_head" in name]
        self.optimizer = MuonWithAdamW(
            matrices,
            others,
            lr=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
        )
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples, device):
        """The rows that count at each TTT step, over all batches of an optimizer step and all processes: `(steps,)`."""
        num_rows = torch.zeros(self.args.ttt_steps, dtype=torch.long)
        for inputs in batch_samples:
            documents = documents_of(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
            num_rows += torch.stack(
                [counted_rows(inputs["labels"], documents, step).sum() for step in range(self.args.ttt_steps)]
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds each step's accuracy, and the acceptance length of a chain that is accepted while the draft agrees."""
        mode = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        counts = self._counts.pop(mode, None)
        if counts is not None:
            num_correct, num_rows = self.accelerator.reduce(counts, "sum")
            accuracy = num_correct / num_rows.clamp(min=1)
            prefix = "eval_" if mode == "eval" else ""
            metrics = {f"{prefix}accuracy_{step}": value for step, value in enumerate(accuracy.tolist())}
            # A token is emitted in any case; the k-th drafted one if the first k agree.
            metrics[f"{prefix}simulated_acceptance_length"] = 1 + accuracy.cumprod(dim=0).sum().item()
            logs = {**logs, **metrics}
        super().log(logs, start_time)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Writes a short card; unlike TRL's it is about using the draft."""
        if not self.is_world_process_zero():
            return
        verifier = self.target_model.config._name_or_path
        is_hub_id = verifier and not Path(verifier).exists()
        card = CARD.format(
            name=self.hub_model_id or model_name or Path(self.args.output_dir).name,
            verifier=verifier if is_hub_id else "a local target",
            base_model=f"base_model: {verifier}\n" if is_hub_id else "",
        )
        Path(self.args.output_dir, "README.md").write_text(card, encoding="utf-8")


def _forward_or_unroll(self, *args, unroll=None, **kwargs):
    if unroll is not None:
        return unroll(self)
    return type(self).forward(self, *args, **kwargs)
