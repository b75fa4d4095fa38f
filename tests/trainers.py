"""Trainers, data and batches of tests about training."""

import copy

import torch
from conftest import make_target
from datasets import Dataset

from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.training.ttt import TTTBatch, documents_of


TEXTS = Dataset.from_dict({"text": [f"the {i} of {i * 7}, and so on to {i * i} in the end" for i in range(40)]})
CHATS = Dataset.from_dict(
    {
        "messages": [
            [
                {"role": "user", "content": f"what is {i}"},
                {"role": "assistant", "content": f"{i} is zz{i}"},
                {"role": "user", "content": "and"},
                {"role": "assistant", "content": "zzz"},
            ]
            for i in range(30)
        ]
    }
)


def make_trainer(
    tmp_path,
    tokenizer,
    model=None,
    dataset=TEXTS,
    target=None,
    eval_dataset=None,
    peft_config=None,
    trainer_class=Eagle3Trainer,
    **arguments,
):
    """A trainer of a few short steps, with these training arguments."""
    arguments = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "warmup_steps": 0,
        "ttt_steps": 3,
        "num_eval_prompts": 1,
        "eval_max_new_tokens": 6,
        **arguments,
    }
    return trainer_class(
        model=model,
        target_model=make_target("llama") if target is None else target,
        args=Eagle3TrainingArguments(str(tmp_path), **arguments),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=copy.deepcopy(tokenizer),
        peft_config=peft_config,
    )


def make_ttt_batch(target, draft, input_ids, labels=None, attention_mask=None, position_ids=None):
    """What a draft learns from in a batch."""
    with torch.no_grad():
        outputs = target(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, output_hidden_states=True
        )
    if position_ids is None:
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    else:
        positions = position_ids
    return TTTBatch(
        input_ids=input_ids,
        aux_hidden_states=torch.cat([outputs.hidden_states[i] for i in draft.resolve_aux_layer_ids(target)], -1),
        target_logits=outputs.logits[..., draft.draft_token_ids],
        target_mass=outputs.logits.softmax(-1)[..., draft.draft_token_ids].sum(-1),
        target_tokens=outputs.logits.argmax(-1),
        labels=input_ids if labels is None else labels,
        documents=documents_of(
            {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        ),
        position_ids=positions,
    )


def losses(trainer):
    """Trains, and returns the losses that were logged."""
    trainer.train()
    return losses_of(trainer)


def losses_of(trainer):
    """The losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
