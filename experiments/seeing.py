# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Compares drafts that were trained with and without images, for a target that has to look.

A picture has four digits. The target, a tiny Gemma 3, writes their names. It is trained here, and then a draft of it on
the same conversations with their pictures, and another without. A third draft also reads the image's own features, where
drafts read the embedding of a placeholder. The script prints the acceptance lengths of all on new pictures. It needs no
network, and about ten minutes on a laptop:

    python experiments/seeing.py --output_dir seeing
"""

import argparse
import string
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE, CELL = 2, 16  # a picture has 2 x 2 cells of 16 x 16 pixels, and the target has one token for each
QUESTION = "which digits"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}>"
    "{% generation %}{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}</s>"
    "{% endgeneration %}{% elif message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<boi>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def make_processor() -> Gemma3Processor:
    """Returns a processor whose tokenizer has one token a character."""
    special = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokens = [*special.values(), *named.values(), *string.ascii_lowercase, *" >.,\n"]
    model = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="."))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special, extra_special_tokens=named)
    tokenizer.chat_template = TEMPLATE
    images = Gemma3ImageProcessorPil(size={"height": SIDE * CELL, "width": SIDE * CELL})
    return Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=SIDE**2)


def make_target(processor: Gemma3Processor) -> Gemma3ForConditionalGeneration:
    """Returns a tiny target with random weights."""
    tokenizer, sizes = processor.tokenizer, {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config={
            **sizes,
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention"] * 4,
            "max_position_embeddings": 512,
        },
        vision_config={**sizes, "num_hidden_layers": 1, "image_size": SIDE * CELL, "patch_size": CELL},
        mm_tokens_per_image=SIDE**2,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    target = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(target.model.multi_modal_projector.mm_input_projection_weight, std=1.0)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    return target


def draw(digits: np.ndarray, generator: np.random.Generator) -> Image.Image:
    """Returns a picture of digits, each at a random place in its cell."""
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for cell, digit in enumerate(digits):
        x, y = CELL * (cell % SIDE) + generator.integers(4, 6), CELL * (cell // SIDE) + generator.integers(1, 3)
        pen.text((x, y), str(digit), fill=tuple(generator.integers(0, 100, 3).tolist()))
    return picture


def make_rows(num_rows: int, seed: int) -> Dataset:
    """Returns conversations about pictures. Each digit has a letter before it, `a` to `d`."""
    generator, rows = np.random.default_rng(seed), []
    for _ in range(num_rows):
        digits = generator.integers(0, 10, SIDE**2)
        answer = ", ".join(f"{letter} {NAMES[digit]}" for letter, digit in zip(string.ascii_lowercase, digits))
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        rows.append({"images": [draw(digits, generator)], "messages": turns})
    return Dataset.from_list(rows).cast_column("images", List(ImageFeature()))


def encode(processor: Gemma3Processor, rows: dict[str, list], with_answers: bool = True) -> dict[str, torch.Tensor]:
    """Returns a batch of the target's inputs."""
    texts = [
        processor.apply_chat_template(
            [{**turns[0], "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}, *turns[1:]][
                : 1 + with_answers
            ],
            add_generation_prompt=not with_answers,
        )
        for turns in rows["messages"]
    ]
    return processor(text=texts, images=rows["images"], padding=True, return_tensors="pt", add_special_tokens=False)


def train_target(target, processor, rows: Dataset, minutes: float, batch_size: int = 32) -> None:
    """Trains the target on answers, for a time."""
    encoded = encode(processor, rows[:])
    begins = (encoded["input_ids"] == processor.tokenizer.convert_tokens_to_ids(">")).cumsum(1) > 0
    encoded["labels"] = encoded["input_ids"].masked_fill(~begins | (encoded["attention_mask"] == 0), -100)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-3)
    start, step, generator = time.monotonic(), 0, np.random.default_rng(0)
    while (elapsed := (time.monotonic() - start) / (60 * minutes)) < 1:
        some = generator.choice(len(rows), batch_size)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 2 * (1 - elapsed) + 0.05)
        loss = target(**{name: values[some] for name, values in encoded.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"Step {step}: the target's loss is {loss.item():.3f}", flush=True)


def acceptance_length(target, draft, processor, rows: Dataset, temperature: float) -> tuple[float, float]:
    """Returns the acceptance length on new pictures, and which share of answers is right."""
    sampling = {"do_sample": temperature > 0, **({"temperature": temperature, "top_k": 0} if temperature else {})}
    lengths, num_right = [], 0
    draft.generation_config.tree_policy = "static"
    for number in range(len(rows)):
        inputs = encode(processor, rows[number : number + 1], with_answers=False)
        set_seed(number)
        text = target.generate(**inputs, assistant_model=draft, max_new_tokens=100, **sampling)
        lengths += draft.last_generation.accepted_lengths
        written = processor.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right += written == rows[number]["messages"][1]["content"]
    return sum(lengths) / len(lengths), num_right / len(rows)


def read_features(target, draft, image_token: int) -> None:
    """Lets a draft read what the target reads at an image's places, in training and in decoding (of one row)."""
    own_embed, features = draft.embed, []

    def keep(module, inputs, outputs):
        features[:] = outputs.detach()  # (images, tokens of one, H)

    def embed(input_ids, embedding=None):
        embeds = own_embed(input_ids, embedding)
        for row, is_image in enumerate(input_ids == image_token):
            num = int(is_image.sum())  # a drafting step may have left the first ones behind
            if 0 < num <= SIDE**2:  # an untrained target also writes such tokens
                embeds[row, is_image] = features[row][-num:].to(embeds)
        return embeds

    target.model.multi_modal_projector.register_forward_hook(keep)
    draft.embed = embed


def train_draft(
    target, processor, rows: Dataset, folder: Path, num_steps: int, seed: int, reads_features: bool = False
):
    """Returns a draft that was trained on the rows."""
    args = Eagle3TrainingArguments(
        str(folder),
        max_steps=num_steps,
        seed=seed,
        per_device_train_batch_size=8,
        assistant_only_loss=True,
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=max(num_steps // 5, 1),
    )
    trainer = Eagle3Trainer(None, target, args, train_dataset=rows, processing_class=processor)
    if reads_features:
        read_features(target, trainer.draft, processor.tokenizer.image_token_id)
    trainer.train()
    trainer.save_model()
    return trainer.draft.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="Folder for the target and the drafts")
    parser.add_argument("--target_minutes", type=float, default=3.0, help="Time to train the target")
    parser.add_argument("--draft_steps", type=int, default=1000, help="Optimizer steps of each draft")
    parser.add_argument("--num_rows", type=int, default=4000, help="Conversations to train on")
    parser.add_argument("--num_pictures", type=int, default=40, help="New pictures to measure on")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the weights, and of the order of the rows")
    args = parser.parse_args()

    folder, processor = Path(args.output_dir), make_processor()
    rows, new_rows = make_rows(args.num_rows, seed=1), make_rows(args.num_pictures, seed=2)
    if not (folder / "target").exists():
        set_seed(args.seed)
        target = make_target(processor)
        train_target(target.train(), processor, rows, args.target_minutes)
        target.save_pretrained(folder / "target")
        processor.save_pretrained(folder / "target")
    target = AutoModelForImageTextToText.from_pretrained(folder / "target").eval()
    print("| trained on | T | acceptance length | answers that are right |\n| --- | --- | --- | --- |")
    kinds = {"pictures": rows, "texts alone": rows.remove_columns("images"), "pictures and features": rows}
    for name, of_draft in kinds.items():
        where, reads_features = folder / name.replace(" ", "-"), name.endswith("features")
        draft = train_draft(target, processor, of_draft, where, args.draft_steps, args.seed, reads_features)
        for temperature in (0.0, 1.0):
            length, share = acceptance_length(target, draft, processor, new_rows, temperature)
            print(f"| {name} | {temperature:g} | {length:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
