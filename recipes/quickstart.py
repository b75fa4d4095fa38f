"""
From nothing to faster text: trains a draft for a target, saves it, loads it in a fresh process, and compares.

Without arguments it works offline and needs no GPU: it trains a small language model on the sources of Python's standard library,
trains a draft for it, and measures both on files that neither has seen.

    python recipes/quickstart.py

The same for any model and data set of the Hub, or for local ones:

    python recipes/quickstart.py --target Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --draft_minutes 60
    python recipes/quickstart.py --target path/to/model --dataset path/to/texts.jsonl --prompts path/to/prompts.jsonl

Conversations (`messages`) are rendered by the target's chat template. The draft gets better if the answers are the target's own:
`--dataset` also takes the folder that `recipes/regenerate.py` wrote.

A second run with the same settings reuses the models of the first.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


if find_spec("trl") is None:
    raise SystemExit("This script needs more packages: pip install 'hf-eagle3[train]'")

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from hf_eagle3 import Eagle3TrainingArguments
from hf_eagle3.checkpoints import target_class
from hf_eagle3.data import load_data, rows_of
from hf_eagle3.environment import emulates_bfloat16, public_name, what_differs
from hf_eagle3.evaluation.tasks import expand, standard_library
from hf_eagle3.file_checks import read_json
from hf_eagle3.hub import write_records
from hf_eagle3.making import FORMS
from hf_eagle3.scripts import ScriptParser, command_line, folder_or_hub_id, positive_integer, run_script
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training.budget import BY_TIME, SHORT, TimeBudget, TimedEagle3Trainer, on_one_gpu, train_for
from hf_eagle3.training.optimizer import MuonWithAdamW, split_parameters
from hf_eagle3.training.record import training_record


NUM_PROMPTS = 20
PROMPT_TOKENS = 48
EOS = "<|endoftext|>"
# Tokens of a row of texts, and of one of conversations.
MAX_LENGTH, MAX_LENGTH_OF_CONVERSATIONS = 256, 512
# For a small target and its texts, and for a chat model (experiments/LOG.md#learning-rates-for-a-chat-model).
LEARNING_RATE, LEARNING_RATE_OF_CONVERSATIONS = 1e-2, 5e-3
# Conversations are packed whole. Prompts are learned, too, because a short training has little text.
OF_CONVERSATIONS = {"packing_strategy": "bfd"}
# Arguments that target and draft do not depend on, and those that only the draft does.
NOT_TRAINED = ("max_new_tokens", "min_steps", "output_dir", "prompts", "repeats")
OF_DRAFT = ("batch_size", "draft_form", "draft_minutes", "draft_vocab_size", "learning_rate")
OF_DRAFT += ("sampled_vocab_size", "ttt_row_share")


def local_or_hub_dataset(name: str, split: str = "train") -> tuple[Dataset, list]:
    """What `recipes/train.py` takes as `--dataset_name`; the last rows are held out as prompts."""
    dataset = rows_of(load_data(name, split=split), split)
    column = "messages" if "messages" in dataset.column_names else "text"
    if column not in dataset.column_names:
        raise ValueError(f"{name} has columns {dataset.column_names}, but neither 'messages' nor 'text'.")
    dataset = dataset.filter(bool, input_columns=column)  # some texts have empty lines
    num_train = len(dataset) - NUM_PROMPTS
    if num_train <= 0:
        raise ValueError(
            f"{name} has {len(dataset)} rows with {column}; {NUM_PROMPTS} are held out as prompts, so it needs more."
        )
    held_out = dataset.select(range(num_train, len(dataset)))[column]
    return dataset.select(range(num_train)).select_columns(column), held_out


def common_arguments(args, max_length: int, batch_size: int) -> dict:
    return {
        "max_length": args.max_length or max_length,
        "per_device_train_batch_size": batch_size,
        **SHORT,
        **BY_TIME,
        "bf16": args.bf16,
        "seed": args.seed,
    }


def train_target(folder: Path, dataset: Dataset, args) -> None:
    """A Qwen3 of 9 million parameters, and its tokenizer."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(dataset["text"], vocab_size=4096, special_tokens=[EOS], show_progress=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=EOS, pad_token=EOS)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    target = Qwen3ForCausalLM(config)
    settings = common_arguments(args, MAX_LENGTH, batch_size=4)
    sft_args = SFTConfig(str(folder) + "-run", gradient_checkpointing=None, **settings)
    trainer = SFTTrainer(
        model=target,
        args=on_one_gpu(sft_args),
        train_dataset=dataset,
        processing_class=tokenizer,
        optimizers=(MuonWithAdamW(*split_parameters(target.named_parameters(), exclude=("embed",)), lr=6e-3), None),
    )
    train_for(trainer, TimeBudget(args.target_minutes, "Target", args.min_steps))
    target = target.to(torch.bfloat16) if trainer.args.bf16 else target
    target.config.use_cache = True  # which training turns off
    save(folder, target, tokenizer, training={"steps": trainer.state.global_step})


def train_draft(folder: Path, target, tokenizer, dataset: Dataset, args) -> None:
    budget = TimeBudget(args.draft_minutes, "Draft", args.min_steps)
    batch_size = args.batch_size or (8 if torch.cuda.is_available() else 4)
    settings = common_arguments(args, MAX_LENGTH, batch_size)
    learning_rate = args.learning_rate or LEARNING_RATE
    if "messages" in dataset.column_names:  # longer rows, and fewer: as many tokens a step
        batch_size = args.batch_size or batch_size * MAX_LENGTH // MAX_LENGTH_OF_CONVERSATIONS
        settings = common_arguments(args, MAX_LENGTH_OF_CONVERSATIONS, batch_size) | OF_CONVERSATIONS
        learning_rate = args.learning_rate or LEARNING_RATE_OF_CONVERSATIONS
    draft_args = Eagle3TrainingArguments(
        str(folder) + "-run",
        learning_rate=learning_rate,
        ttt_steps=5,  # in minutes on a CPU new tokens teach more than later steps
        ttt_row_share=args.ttt_row_share,
        draft_form=args.draft_form,
        model_init_kwargs={"model_type": "llama" if args.draft_form == "classic" else "qwen3"},
        draft_vocab_size=min(args.draft_vocab_size, target.config.get_text_config().vocab_size),
        sampled_vocab_size=args.sampled_vocab_size,
        **settings,
    )
    trainer = TimedEagle3Trainer(
        model=None,
        target_model=target,
        args=on_one_gpu(draft_args),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.dataset_names = [args.dataset or "the sources of Python's standard library"]
    train_for(trainer, budget)
    draft = trainer.draft.to(target.dtype)
    command = shlex.join(["python", "recipes/quickstart.py", *map(public_name, sys.argv[1:])])
    save(folder, draft, training=training_record(trainer, draft.state_dict()) | {"command": command})


def save(folder: Path, *objects, training: dict | None = None) -> None:
    """All or nothing: an interrupted run leaves no folder that the next one would take for finished."""
    unfinished = folder.with_name(folder.name + "-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for item in objects:
        item.save_pretrained(unfinished)
    write_records(unfinished, training, None)
    unfinished.rename(folder)


def write_prompts(path: Path, held_out: list, tokenizer) -> None:
    prompts = []
    for item in held_out[:NUM_PROMPTS]:
        if isinstance(item, str):
            ids = tokenizer(item, add_special_tokens=False)["input_ids"][:PROMPT_TOKENS]
            prompts.append({"prompt": tokenizer.decode(ids)})
        else:
            answers = (i for i, message in enumerate(item) if message["role"] == "assistant" and i > 0)
            prompts.append({"messages": item[: next(answers, len(item))]})
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")


def check_arguments(file: Path, now: dict) -> None:
    """Ends the run if the models that are beside the `file` were trained with other arguments than `now`."""
    output_dir = file.parent
    has_draft = (output_dir / "draft").exists()
    if has_draft or (output_dir / "target").exists():
        then = read_json(file)
        free = () if has_draft else OF_DRAFT
        if difference := what_differs(*({k: v for k, v in each.items() if k not in free} for each in (then, now))):
            raise SystemExit(
                f"{output_dir} was trained with other settings: {difference}. Choose another --output_dir, or delete draft and target."
            )
        print(f"Reusing what {output_dir} has of target and draft, trained with the same settings.", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--target", type=folder_or_hub_id, help="Folder or Hub id of a target. By default a small one is trained"
    )
    parser.add_argument(
        "--dataset", help="File, folder or Hub id with `messages` or `text`. By default the standard library's sources"
    )
    parser.add_argument(
        "--dataset_train_split", help="The split of --dataset, or a part: train[:1000]. By default train"
    )
    parser.add_argument("--prompts", help="JSON Lines file of held-out prompts. By default the end of the data set")
    parser.add_argument(
        "--output_dir", default="outputs/quickstart", help="Folder for both models. By default %(default)s"
    )
    parser.add_argument(
        "--target_minutes", type=float, default=2, help="Time to train the small target. By default %(default)s"
    )
    parser.add_argument(
        "--draft_minutes", type=float, default=1.5, help="Time to train the draft. By default %(default)s"
    )
    parser.add_argument(
        "--min_steps",
        type=int,
        default=100,
        help="Minimum number of training steps, even if they take up to five times the minutes. By default %(default)s",
    )
    parser.add_argument(
        "--draft_vocab_size",
        type=int,
        default=32000,
        help="Size of the draft vocabulary. By default %(default)s, or the target's if that is smaller",
    )
    parser.add_argument(
        "--draft_form",
        choices=list(FORMS),
        default="eagle3.1",
        help="By default %(default)s. Most engines take classic, but its acceptance length is lower",
    )
    parser.add_argument(
        "--sampled_vocab_size",
        type=int,
        default=1024,
        help="Number of improbable tokens in the loss. By default %(default)s. A large number takes all",
    )
    parser.add_argument(
        "--learning_rate",
        type=float,
        help=f"By default {LEARNING_RATE}, or {LEARNING_RATE_OF_CONVERSATIONS} for conversations. Tried with small targets only",
    )
    parser.add_argument(
        "--ttt_row_share",
        type=float,
        default=0.6,
        help="Share of positions that each drafting step passes on to the next. By default %(default)s",
    )
    parser.add_argument(
        "--max_length",
        type=int,
        help=f"Tokens of a row. By default {MAX_LENGTH}, or {MAX_LENGTH_OF_CONVERSATIONS} for conversations",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="Rows per training step. By default as many as make 1,024 tokens, or 2,048 on GPUs",
    )
    parser.add_argument(
        "--max_new_tokens", type=int, help="New tokens per prompt. By default 48, or 96 for conversations"
    )
    parser.add_argument(
        "--repeats", type=positive_integer, default=1, help="How often to measure. By default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    has_bfloat16 = not emulates_bfloat16(torch.device("cpu"))
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_bf16_supported() if torch.cuda.is_available() else has_bfloat16,
        help="Train and compare in bfloat16. Its rounding can change texts at near ties. By default on if the hardware supports it",
    )
    args = parser.parse_args()
    if args.target is not None and args.dataset is None:
        parser.error("--target needs a --dataset to train its draft on")
    if args.dataset_train_split and args.dataset is None:
        parser.error("--dataset_train_split is for --dataset")
    if args.prompts is not None:
        expand([args.prompts])  # raises an error for what does not exist, before the training
    return args


def train_missing(args, dataset: Dataset, target_name: str, draft_dir: Path, dtype: str):
    """Trains the small target and the draft, unless they are there. Returns the tokenizer."""
    if args.target is None and not Path(target_name).exists():
        print(f"Training a small target on {len(dataset)} pieces of the standard library ...", flush=True)
        train_target(Path(target_name), dataset, args)
        if draft_dir.exists():  # what was deleted is not what the draft was trained for
            print(f"{draft_dir} is older than its target: it is trained anew.", flush=True)
            shutil.rmtree(draft_dir)
    tokenizer = load_tokenizer(target_name)
    if not draft_dir.exists():
        print(f"Training a draft for {target_name} ...", flush=True)
        target = target_class(target_name).from_pretrained(target_name, dtype=dtype)
        train_draft(draft_dir, target, tokenizer, dataset, args)
    return tokenizer


def compare_in_fresh_process(
    args, target_name: str, draft_dir: Path, prompts: str, dtype: str, max_new_tokens: int
) -> Path:
    """Measures the draft in a fresh process. Returns the file of results."""
    output_dir = Path(args.output_dir)
    results = output_dir / "results.jsonl"
    results.unlink(missing_ok=True)  # what another run measured
    print(f"Generating in a fresh process, with {target_name} and {draft_dir} ...", flush=True)
    command = [sys.executable, str(Path(__file__).with_name("benchmark.py"))]
    command += ["--target", target_name, "--draft", str(draft_dir), "--prompts", prompts]
    command += ["--dtype", dtype, "--max_new_tokens", str(max_new_tokens), "--repeats", str(args.repeats)]
    command += ["--json", str(results), "--plots", str(output_dir / "plots"), "--show_text"]
    if (code := subprocess.run(command).returncode) != 0:
        raise SystemExit(
            f"The comparison ended with exit code {code}. To compare again, run this script again, or {command_line(command)}"
        )
    return results


def closing_message(output_dir: Path, results: Path, min_steps: int, is_small_target: bool) -> str:
    """Returns how to publish the draft, or why the figures mean little."""
    records = {name: output_dir / name / "training.json" for name in ("target", "draft")}
    steps = {name: read_json(file)["steps"] for name, file in records.items() if file.exists()}
    for name, num in steps.items():  # a draft is trained anew after its target
        if num < min_steps:
            return (
                f"The {name} was trained for {num} steps only, of {min_steps} (--min_steps), so that these figures mean little. "
                f"When the cores are free, delete {output_dir / name} and run this again, with more --{name}_minutes if need be."
            )
    if is_small_target:
        target, draft = str(output_dir / "target"), str(output_dir / "draft")
        command = [sys.executable, "recipes/inspect_draft.py", draft, "--target", target, "--prompt", "import"]
        return (
            "A target this small repeats itself at T=0, so lookup and drafts look better there than with a larger model. To see what "
            f"each step drafts and keeps: {command_line(command)}\nTo train a draft for your own model, pass --target and --dataset."
        )
    command = [sys.executable, "recipes/push.py", str(output_dir / "draft"), "--benchmark", str(results)]
    return f"To publish the draft, with a card that has these figures: {command_line(command)}"


def main():
    args = parse_arguments()
    output_dir = Path(args.output_dir)
    arguments_file = output_dir / "arguments.json"
    arguments = {name: value for name, value in vars(args).items() if name not in NOT_TRAINED}
    check_arguments(arguments_file, arguments)
    set_seed(args.seed)
    if args.dataset is None:
        documents, held_out = standard_library(NUM_PROMPTS)
        dataset = Dataset.from_dict({"text": documents})
    else:
        dataset, held_out = local_or_hub_dataset(args.dataset, args.dataset_train_split or "train")
    is_chat = "messages" in dataset.column_names
    if is_chat and args.target is None:
        raise SystemExit(
            f"{args.dataset} has conversations, and the small target knows texts only. Pass a --target that can chat."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    # Not before there are data: a run beside this one may need the old ones.
    arguments_file.write_text(json.dumps(arguments), encoding="utf-8")
    target_name, draft_dir = args.target or str(output_dir / "target"), output_dir / "draft"
    dtype = "auto" if args.bf16 else "float32"  # a target of others is stored in bfloat16 most often
    tokenizer = train_missing(args, dataset, target_name, draft_dir, dtype)
    prompts = args.prompts
    if prompts is None:
        prompts = str(output_dir / "prompts.jsonl")
        write_prompts(Path(prompts), held_out, tokenizer)
    results = compare_in_fresh_process(
        args, target_name, draft_dir, prompts, dtype, args.max_new_tokens or (96 if is_chat else 48)
    )
    print(closing_message(output_dir, results, args.min_steps, is_small_target=args.target is None))


if __name__ == "__main__":
    run_script(main)
