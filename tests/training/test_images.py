"""Training on images."""

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB_SIZE
from datasets import Dataset
from datasets import Image as ImageFeature
from datasets import List as ListFeature
from seeing import VISION_TEMPLATE, gemma3, gemma4, make, make_image, make_processor, qwen3_5, qwen3_vl
from trainers import make_trainer

from hf_eagle3.training.ttt import ttt_unroll


FAMILIES = [gemma3, gemma4, qwen3_vl, qwen3_5]


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rows(num=4):
    """Rows with one image, two, and none."""
    examples = []
    for number in range(num):
        images = [make_image(seed, 16 + 4 * number) for seed in range(number, number + (1, 2, 0)[number % 3])]
        examples.append({"images": images, "messages": turns(f"what is {number}", f"it is {number * 7}", "so", "zz")})
    return Dataset.from_list(examples).cast_column("images", ListFeature(ImageFeature()))


def make_vision_trainer(tmp_path, family=qwen3_vl, template=VISION_TEMPLATE, **arguments):
    target, _ = make(family, 0)
    arguments = {"dataset": rows(), "report_to": "none", "shuffle_dataset": False, **arguments}
    arguments["target"] = arguments.get("target", target)
    return make_trainer(tmp_path, make_processor(family, template), **arguments)


def batches(trainer):
    return [trainer._prepare_inputs(batch) for batch in trainer.get_eval_dataloader(trainer.train_dataset)]


def shake(draft):
    torch.manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1


def recorded(draft, target, inputs, num_tokens):
    """
    What `generate` writes after a prompt, and what the draft does in it: the positions and logits of the newest token of the
    text, and the embedding, position and logits of the first node below it.
    """
    forwards, combine = [], draft.combine_hidden_states

    def recording(*args, **kwargs):
        outputs = type(draft).forward(draft, *args, **kwargs)
        forwards.append((kwargs["inputs_embeds"], kwargs["position_ids"], outputs.logits))
        return outputs

    def combining(states):
        forwards.append("reads the target")
        return combine(states)

    draft.generation_config.tree_policy = "static"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(draft, "forward", recording)
        patches.setattr(draft, "combine_hidden_states", combining)
        text = target.generate(**inputs, assistant_model=draft, max_new_tokens=num_tokens, do_sample=False)
    starts = [number for number, each in enumerate(forwards) if isinstance(each, str)]
    pairs = [forwards[start + 1 : start + 3] for start in starts]
    pairs = [pair for pair in pairs if len(pair) == 2 and not any(isinstance(each, str) for each in pair)]
    return text, [(*newest[1:], *below) for newest, below in pairs]


@pytest.mark.parametrize("family", FAMILIES)
def test_unroll_equals_drafting_with_images(tmp_path, family):
    """A draft's logits in `generate` are those of training on the same text, right after the text and one token later."""
    trainer = make_vision_trainer(tmp_path, family, draft_vocab_size=None, max_length=None)
    draft, target = trainer.draft.eval(), trainer.target_model
    shake(draft)
    for row in trainer.train_dataset.select([0, 1]):
        prompt_length = row["image_end"] + 3
        inputs = trainer.data_collator([row])
        del inputs["labels"]
        prompt = {
            name: value[:, :prompt_length] if value.shape == inputs["input_ids"].shape else value
            for name, value in inputs.items()
        }
        text, drafted_steps = recorded(draft, target, prompt, 12)
        kinds = {name: text.new_zeros(text.shape) for name in inputs if name.endswith("token_type_ids")}
        for name, value in kinds.items():
            value[:, :prompt_length] = prompt[name]
        whole = {**inputs, **kinds, "input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}
        batch = trainer.target_features(whole)
        embeddings, num_compared = draft.embed(torch.arange(VOCAB_SIZE)), 0
        for positions, logits, embeds, below, logits_below in drafted_steps:
            row_number = int(positions[0, -1])
            if row_number + 2 >= text.shape[1]:
                continue
            (node_token,) = (embeddings == embeds[0, 0]).all(-1).nonzero()[0].tolist()
            drafted = text.clone()
            drafted[0, row_number + 2] = node_token  # the draft goes on with its own token
            first, second = (
                draft.lm_head(states)[0, row_number]
                for states, *_ in ttt_unroll(draft, replace(batch, input_ids=drafted), 2)
            )
            torch.testing.assert_close(logits[0, -1], first, atol=2e-4, rtol=1e-3)
            assert below[0, 0] == row_number + 1
            torch.testing.assert_close(logits_below[0, 0], second, atol=2e-4, rtol=1e-3)
            num_compared += 1
        assert num_compared >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_each_row_alone(tmp_path, family):
    trainer = make_vision_trainer(tmp_path, family, per_device_eval_batch_size=4, max_length=None)
    (together,) = batches(trainer)
    assert sorted(together) != ["attention_mask", "input_ids", "labels"]
    features = trainer.target_features(together)
    for number, row in enumerate(trainer.train_dataset):
        alone = trainer.target_features(trainer._prepare_inputs(trainer.data_collator([row])))
        length = len(row["input_ids"])
        assert together["input_ids"][number, :length].tolist() == row["input_ids"]
        theirs = features.aux_hidden_states[number, :length]
        torch.testing.assert_close(theirs, alone.aux_hidden_states[0], atol=1e-4, rtol=1e-3)
    other = {**together, "pixel_values": together["pixel_values"].flip(0)}
    changed = trainer.target_features(other).aux_hidden_states
    assert (changed[0] - features.aux_hidden_states[0]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_evaluation(tmp_path, family):
    trainer = make_vision_trainer(
        tmp_path,
        family,
        eval_dataset=rows(3),
        assistant_only_loss=True,
        per_device_train_batch_size=2,
        max_length=None,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    assert trainer.evaluate()["eval_acceptance_length"] >= 1
