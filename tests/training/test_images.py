"""Training on images."""

import json
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import CHAT_TEMPLATE, VOCAB_SIZE, make_target
from datasets import Dataset, Features, Value, load_dataset
from datasets import Image as ImageFeature
from datasets import List as ListFeature
from peft import LoraConfig
from seeing import (
    IMAGE,
    UNMARKED_TEMPLATE,
    VISION_TEMPLATE,
    gemma3,
    gemma4,
    llava,
    make,
    make_image,
    make_processor,
    mllama,
    qwen3_5,
    qwen3_vl,
)
from trainers import make_trainer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.checkpoints import target_class
from hf_eagle3.data import ImageReader, RowEncoder
from hf_eagle3.data.encoded import read_whole
from hf_eagle3.data.images import IMAGE_INPUT
from hf_eagle3.training.record import training_record
from hf_eagle3.training.target_states import TargetStates
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
    if "target" not in arguments:
        arguments["target"], _ = make(family, 0)
    arguments = {"dataset": rows(), "shuffle_dataset": False, **arguments}
    return make_trainer(tmp_path, make_processor(family, template), **arguments)


def batches(trainer, rows=None):
    return [
        trainer._prepare_inputs(batch)
        for batch in trainer.get_eval_dataloader(trainer.train_dataset if rows is None else rows)
    ]


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
        of_tokens = {name for name, value in inputs.items() if value.shape == inputs["input_ids"].shape}
        cut = {name: value[:, :prompt_length] if name in of_tokens else value for name, value in inputs.items()}
        prompt = {name.removeprefix(IMAGE_INPUT): value for name, value in cut.items()}
        text, drafted_steps = recorded(draft, target, prompt, 8)
        kinds = {name: text.new_zeros(text.shape) for name in inputs if name.endswith("token_type_ids")}
        for name, value in kinds.items():
            value[:, :prompt_length] = prompt[name.removeprefix(IMAGE_INPUT)]
        whole = {**inputs, **kinds, "input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}
        batch = trainer.target_batch(whole)
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
    batch = trainer.target_batch(together)
    for number, row in enumerate(trainer.train_dataset):
        alone = trainer.target_batch(trainer._prepare_inputs(trainer.data_collator([row])))
        length = len(row["input_ids"])
        assert together["input_ids"][number, :length].tolist() == row["input_ids"]
        theirs = batch.aux_hidden_states[number, :length]
        torch.testing.assert_close(theirs, alone.aux_hidden_states[0], atol=1e-4, rtol=1e-3)
    other = {**together, IMAGE_INPUT + "pixel_values": together[IMAGE_INPUT + "pixel_values"].flip(0)}
    changed = trainer.target_batch(other).aux_hidden_states
    assert (changed[0] - batch.aux_hidden_states[0]).abs().max() > 1e-3


@pytest.mark.parametrize("layer", [-2, [-1, -2]])
def test_a_target_that_reads_one_of_the_layers_of_an_image(layer):
    """LLaVA gives these the choice of the text's layers, too."""
    target, inputs = make(llava, 1)
    target.config.vision_feature_layer = layer
    target = type(target)(target.config).eval()
    with torch.no_grad():
        expected = target(**inputs, output_hidden_states=True)
    batch = {**inputs, IMAGE_INPUT + "pixel_values": inputs.pop("pixel_values")}
    states, _ = TargetStates(target, [2])(batch)
    torch.testing.assert_close(states, expected.hidden_states[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_evaluation(tmp_path, family):
    settings = {"per_device_train_batch_size": 2, "max_length": None, "max_steps": 2, "ttt_steps": 2}
    trainer = make_vision_trainer(tmp_path, family, eval_dataset=rows(3), assistant_only_loss=True, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    first, again = trainer.evaluate(), trainer.evaluate(trainer.eval_dataset)  # which has been prepared
    assert first["eval_acceptance_length"] >= 1
    assert again["eval_loss"] == pytest.approx(first["eval_loss"])


def labels_of(trainer, row):
    tokens = [token for token in row["labels"] if token != -100]
    return trainer.processing_class.decode(tokens)


@pytest.mark.parametrize("template", [VISION_TEMPLATE, UNMARKED_TEMPLATE])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_assistant_s_tokens_beside_images(tmp_path, family, template):
    """All other tokens of prompts are learned, if the caller wants it. No target writes those of images."""
    trainer = make_vision_trainer(tmp_path, family, template, assistant_only_loss=True, max_length=None)
    for number, row in enumerate(trainer.train_dataset):
        assert labels_of(trainer, row) == f"it is {number * 7}</s>zz</s>"
        kinds = trainer.data_collator([row])
        places = [value for name, value in kinds.items() if name.endswith("token_type_ids")]
        assert row["image_end"] == (int(places[0].nonzero().max()) + 1 if places else 0)
    if template == VISION_TEMPLATE:
        whole = make_vision_trainer(tmp_path, family, max_length=None, draft_vocab_size=None).train_dataset
        for row in whole:
            assert row["labels"] == [-100 if token == IMAGE else token for token in row["input_ids"]]
        assert any(IMAGE in row["input_ids"] for row in whole)


def test_forms_of_rows(tmp_path):
    image, token, (target, _) = make_image(0), make_processor(qwen3_vl).image_token, make(qwen3_vl, 0)
    make_image(1).save(tmp_path / "one.png")
    path = str(tmp_path / "one.png")
    shown = [{"type": "image", "text": None}, {"type": "text", "text": "what"}]
    own = [{"type": "image_url", "text": None, "image_url": {"url": path}}, {"type": "text", "text": "what"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "b"}]}
    held = [{"type": "image", "text": None, "image": image}, {"type": "text", "text": "what", "image": None}]
    forms = {
        "U:.IMAGE.what|A:b</s>": [
            {"messages": turns("what", "b"), "image": image},
            {"messages": turns("what", "b"), "images": [path]},
            {"messages": [{"role": "user", "content": shown}, answer], "images": [image]},
            {"messages": [{"role": "user", "content": own}, answer]},
            {"messages": [{"role": "user", "content": held}, answer]},
            {"prompt": turns("what"), "completion": turns("what", "b")[1:], "image": path},
            {"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "b"}], "image": path},
            {"messages": turns("<image>what", "b"), "image": path},
        ],
        "a.IMAGE.bc</s>": [
            {"text": f"a.{token}.bc", "image": image},
            {"prompt": f"a.{token}.b", "completion": "c", "image": image},
        ],
    }
    for text, examples in forms.items():
        for example in examples:
            trainer = make_vision_trainer(tmp_path, dataset=Dataset.from_list([example]), target=target)
            (row,) = trainer.train_dataset
            said = trainer.processing_class.decode(row["input_ids"]).replace(" ", "")
            assert said.removeprefix("<s>") == text.replace("IMAGE", token * 4)
            assert trainer.data_collator([row])[IMAGE_INPUT + "pixel_values"].shape == (16, 96)


def test_texts_of_a_function(tmp_path):
    token = make_processor(qwen3_vl).image_token

    def text_of(row):
        return f"a.{token}.{row['messages'][0]['content']}"

    arguments = {"dataset": rows().select([0]), "trainer_class": partial(Eagle3Trainer, formatting_func=text_of)}
    trainer = make_vision_trainer(tmp_path, template=UNMARKED_TEMPLATE, **arguments)
    assert trainer.train_dataset[0]["image_end"] == 6
    assert trainer.data_collator([trainer.train_dataset[0]])[IMAGE_INPUT + "pixel_values"].shape == (16, 96)


def test_images_are_stored_once(tmp_path, monkeypatch):
    """Rows that nothing cuts are not written again with their images."""
    written, mapped = [], Dataset.map

    def recording(dataset, *args, **kwargs):
        written.append("image_data" in dataset.column_names)
        return mapped(dataset, *args, **kwargs)

    monkeypatch.setattr(Dataset, "map", recording)
    for max_length, is_written in ((64, False), (14, True)):
        written.clear()
        make_vision_trainer(tmp_path, max_length=max_length)
        assert written and any(written) == is_written


def test_an_image_that_is_there_in_the_next_run(tmp_path):
    """Rows of files are cached, and the cache knows nothing of images."""
    row = {"messages": turns("what", "b"), "images": [str(tmp_path / "late.png")]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    def make_trainer():
        kwargs = {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache"), "split": "train"}
        return make_vision_trainer(tmp_path, dataset=load_dataset("json", **kwargs))

    with pytest.raises(ValueError, match="Row 0: there is no image .*late.png"):
        make_trainer()
    make_image(0).save(tmp_path / "late.png")
    trainer = make_trainer()
    row = trainer.train_dataset[0]
    trainer.data_collator([row])
    with pytest.raises(ValueError, match="the image or the processor has changed since"):
        trainer.data_collator([{**row, "input_ids": row["input_ids"][1:]}])


def test_a_processor_that_counts_on_tensors_and_marks_no_token(tmp_path):
    """As Ovis 2's. All of its row is then taken for an image."""
    processor = make_processor(qwen3_vl)

    class Other(type(processor)):
        image_token_ids = ()

        def replace_image_token(self, image_inputs, image_idx, **kwargs):
            assert image_inputs["image_grid_thw"][image_idx].tolist()
            return super().replace_image_token(image_inputs, image_idx, **kwargs)

    processor.__class__ = Other
    encoder = RowEncoder(processor.tokenizer, "messages", images=ImageReader(processor))
    row = encoder({"messages": turns("what", "b"), "image": make_image(0)})
    assert row["image_end"] == len(row["input_ids"])


def test_streams(tmp_path):
    stream, few = rows().to_iterable_dataset(), {"max_steps": 2, "ttt_steps": 1, "per_device_train_batch_size": 2}
    trainer = make_vision_trainer(tmp_path, dataset=stream, max_length=64, **few)
    whole = make_vision_trainer(tmp_path, max_length=64, per_device_eval_batch_size=2)
    for ours, theirs in zip(trainer.get_train_dataloader(), whole.get_eval_dataloader(whole.train_dataset)):
        assert sorted(ours) == sorted(theirs)
        assert ours[IMAGE_INPUT + "pixel_values"].shape == theirs[IMAGE_INPUT + "pixel_values"].shape
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    evaluated = make_vision_trainer(tmp_path, eval_dataset=rows().to_iterable_dataset(), max_length=64)
    kept = make_vision_trainer(tmp_path, eval_dataset=rows(), max_length=64)
    for ours, theirs in zip(evaluated.get_eval_dataloader(), kept.get_eval_dataloader()):
        assert ours[IMAGE_INPUT + "pixel_values"].shape == theirs[IMAGE_INPUT + "pixel_values"].shape
    read = read_whole(evaluated.eval_dataset)  # as several processes do
    for ours, theirs in zip(batches(evaluated, read), batches(kept, kept.eval_dataset), strict=True):
        assert torch.equal(ours[IMAGE_INPUT + "pixel_values"], theirs[IMAGE_INPUT + "pixel_values"])


def test_max_length_cuts_no_image(tmp_path, caplog):
    whole = make_vision_trainer(tmp_path, max_length=None).train_dataset
    ends, lengths = whole["image_end"], [len(tokens) for tokens in whole["input_ids"]]
    assert sorted(ends) == [0, 5, 7, 13] and min(lengths) > 14
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_vision_trainer(tmp_path, max_length=12)
    told = "1 of 4 rows of the train data are dropped: `max_length=12` would cut their images, which end at up to 13"
    assert told in caplog.text
    assert sorted(trainer.train_dataset["image_end"]) == [0, 5, 7]
    assert {len(tokens) for tokens in trainer.train_dataset["input_ids"]} == {12}
    (batch,) = batches(trainer)
    assert batch[IMAGE_INPUT + "mm_token_type_ids"].shape == batch["input_ids"].shape == (3, 12)
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        stream = make_vision_trainer(tmp_path, dataset=rows().to_iterable_dataset(), max_length=12)
        assert [row["image_end"] for row in stream.train_dataset] == [7, 0, 5]
    assert "1 rows of the train data so far are dropped" in caplog.text
    with pytest.raises(ValueError, match="2 of 2 rows of the train data are dropped: `max_length=5` would cut"):
        make_vision_trainer(tmp_path, dataset=rows().select([0, 1]), max_length=5)


def test_errors(tmp_path):
    target, _ = make(qwen3_vl, 0)

    def wrong(**changes):
        row = {"messages": turns("a", "b"), **changes}
        return make_vision_trainer(tmp_path, dataset=Dataset.from_list([row]), target=target)

    (tmp_path / "broken.png").write_bytes(b"no image")
    image, token = make_image(0), make_processor(qwen3_vl).image_token
    two_places = [{"role": "user", "content": [{"type": "image"}] * 2}, {"role": "assistant", "content": []}]
    for changes, reason in (
        ({"images": ["nothing.png"]}, "there is no image nothing.png .from the folder .*Correct the path"),
        ({"images": [str(tmp_path / "broken.png")]}, "an image cannot be read"),
        ({"messages": two_places, "image": image}, "its messages have 2 places for images, but it has 1 images"),
        ({"messages": turns(f"this {token}", "b"), "image": image}, "it has 1 images, but its text has 2 places for"),
    ):
        with pytest.raises(ValueError, match=f"Row 0: {reason}"):
            wrong(**changes)
    missing = Dataset.from_list([{"messages": turns("a", "b"), "image": str(tmp_path / "gone.png")}])
    with pytest.raises(ValueError, match="Row 0: an image cannot be read: .*gone.png"):
        make_vision_trainer(tmp_path, dataset=missing.cast_column("image", ImageFeature()), target=target)
    mixed = rows().select([0]).to_list() + [{"images": [], "messages": turns(f"this {token}", "b")}]
    mixed = Dataset.from_list(mixed).cast_column("images", rows().features["images"])
    with pytest.raises(ValueError, match="Row 1: it has 0 images, but its text has 1 places for them"):
        make_vision_trainer(tmp_path, dataset=mixed, target=target)
    for argument in ("packing", "padding_free"):
        with pytest.raises(ValueError, match=f"packed rows cannot have any: .* Leave out `{argument}`"):
            make_vision_trainer(tmp_path, target=target, **{argument: True})
    with pytest.raises(ValueError, match="`truncation_mode='keep_end'` would cut them"):
        make_vision_trainer(tmp_path, target=target, truncation_mode="keep_end")
    make_vision_trainer(tmp_path, target=target, truncation_mode="keep_end", max_length=None)
    # No images, nothing to refuse.
    texts = Dataset.from_list([{"messages": turns("what is a", "it is b"), "images": []}] * 4)
    make_vision_trainer(tmp_path, dataset=texts, target=target, packing=True, max_steps=1, ttt_steps=1).train()


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_a_broken_image_of_a_message_is_named(tmp_path, caplog, name):
    """Reading its row decodes it."""
    part = {"type": Value("string"), "text": Value("string"), "image": ImageFeature()}
    message = {"role": Value("string"), "content": ListFeature(part)}
    (tmp_path / "broken.png").write_bytes(b"no image")
    make_image(0).save(tmp_path / "whole.png")

    def messages(role, file):
        shown = {"type": "image", "image": {"path": str(tmp_path / file), "bytes": None}}
        return [{"role": role, "content": [shown, {"type": "text", "text": "what"}]}]

    answer = [{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    examples = [messages("user", file) for file in ("whole.png", "broken.png")]
    examples.append(examples[0] + answer + messages("tool", "broken.png"))
    columns = [name, "completion"] if name == "prompt" else [name]
    examples = [{columns[0]: example, "completion": answer} for example in examples]
    if name == "messages":
        examples = [{name: example[name] + answer} for example in examples]
    dataset = Dataset.from_list(examples, Features({column: ListFeature(message) for column in columns}))
    target, _ = make(qwen3_vl, 0)
    with pytest.raises(ValueError, match="2 of 3 rows .* Row 1 .1 more: 2.: an image cannot be read"):
        make_vision_trainer(tmp_path, dataset=dataset, target=target)
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        stream = make_vision_trainer(tmp_path, dataset=dataset.to_iterable_dataset(), target=target)
        assert len(list(stream.train_dataset)) == 1
    assert "Row 1 of the train data cannot be learned from: an image cannot be read" in caplog.text


def test_errors_of_targets_and_processors(tmp_path, tokenizer):
    blind = "it has images, but LlamaForCausalLM reads text only. Pass a target that sees"
    for target, reason in ((make_target("llama"), blind), (mllama(), "attends to images in separate layers")):
        with pytest.raises(ValueError, match=reason):
            make_vision_trainer(tmp_path, target=target)
    target, _ = make(qwen3_vl, 0)
    without_template, without_images = make_processor(qwen3_vl), make_processor(qwen3_vl, CHAT_TEMPLATE)
    without_template.chat_template = without_template.tokenizer.chat_template = None
    for processor, reason in (
        (tokenizer, "`processing_class` is a tokenizer. Pass the target's processor"),
        (without_template, "has no chat template. Pass one as `chat_template_path`"),
        (without_images, "it has 1 images, but its text has 0 places for them"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_trainer(tmp_path, processor, dataset=rows().select([0]), target=target)


def test_a_target_and_its_processor_by_name(tmp_path):
    target, _ = make(gemma3, 0)
    target.save_pretrained(tmp_path / "target")
    make_processor(gemma3).save_pretrained(tmp_path / "target")
    args = Eagle3TrainingArguments(str(tmp_path / "draft"), report_to="none", use_cpu=True, bf16=False, max_steps=1)
    trainer = Eagle3Trainer(None, str(tmp_path / "target"), args, train_dataset=rows().select([0]))
    trainer.train()
    assert type(trainer.target_model).__name__ == "Gemma3ForConditionalGeneration"
    target, _ = make(qwen3_5, 0)
    target.save_pretrained(tmp_path / "other")
    assert target_class(str(tmp_path / "other")) is AutoModelForCausalLM
    assert target_class(str(tmp_path / "other"), with_images=True) is AutoModelForImageTextToText
    target, _ = make(qwen3_vl, 0)  # no class of text alone takes it
    target.save_pretrained(tmp_path / "other")
    assert target_class(str(tmp_path / "other")) is AutoModelForImageTextToText


def test_records_cards_and_resumption(tmp_path, monkeypatch):
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2}
    first = make_vision_trainer(tmp_path / "a", **arguments)
    first.train()
    with monkeypatch.context() as patches:
        patches.setattr(Dataset, "__getitem__", lambda *args: pytest.fail("each checkpoint reads the rows"))
        assert training_record(first)["rows_with_images"] == 3
    first.create_model_card()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "3 of 4 rows have images" in card and "AutoModelForImageTextToText" in card
    resumed = make_vision_trainer(tmp_path / "a", **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    ours, theirs = ({log["step"]: log.get("loss") for log in each.state.log_history} for each in (resumed, first))
    assert ours == theirs
    for name, weight in first.draft.named_parameters():
        torch.testing.assert_close(resumed.draft.get_parameter(name), weight)


def test_stored_features(tmp_path):
    few = {"max_steps": 1, "ttt_steps": 2}
    trainer = make_vision_trainer(tmp_path / "a", gemma3, **few)
    store = trainer.extract_features(tmp_path / "features", rows_per_shard=2)
    stored = make_vision_trainer(tmp_path / "b", gemma3, dataset=store, **few)
    losses = [(each.train(), each.state.log_history[0]["loss"])[1] for each in (trainer, stored)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    trainer.extract_features(tmp_path / "features", rows_per_shard=2)
    others = rows().map(lambda row: {"images": [image.rotate(90) for image in row["images"]]})
    with pytest.raises(ValueError, match="holds features of other rows"):
        make_vision_trainer(tmp_path, gemma3, dataset=others).extract_features(tmp_path / "features", 2)


def test_adapters(tmp_path):
    target, _ = make(qwen3_vl, 0)
    draft = Eagle3ForSpeculation.from_target(target)
    peft_config = LoraConfig(r=4, target_modules=["q_proj"])
    trainer = make_vision_trainer(tmp_path, target=target, model=draft, peft_config=peft_config, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
