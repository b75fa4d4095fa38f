"""
What does a trained draft bring? A part of `gpu_report.py`. A small chat model answers prompts, a draft trains on the
answers for a minute or two, and `generate` is timed with and without it.
"""

import json
import random
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from datasets import Dataset, load_dataset
from gpu_steps import TINY, way_of
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_eagle3 import Eagle3ForSpeculation, Eagle3TrainingArguments
from hf_eagle3.data.answers import Output, complete_lines
from hf_eagle3.data.regeneration import regenerate_locally
from hf_eagle3.environment import environment
from hf_eagle3.evaluation import BenchmarkResults, format_table, load_prompts, plot_all, run_benchmark
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training.budget import BY_TIME, SHORT, TimeBudget, TimedEagle3Trainer, train_for


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGEST_PROMPT = 384  # tokens; longer prompts would hold up their batches
ANSWER = 256  # tokens at most
TEMPERATURE = 0.7


def tiny_target(folder: Path) -> tuple[Path, list[list[dict]]]:
    """Returns a random chat model and some chats, for a rehearsal."""
    words = ["a", "few", "words", "that", "chats", "may", "have", "in", "them", "and", "some", "more"]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=12)) for _ in range(40)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    target = LlamaForCausalLM(LlamaConfig(**{**TINY, **ids, "vocab_size": len(tokenizer), "initializer_range": 0.3}))
    for each in (target, tokenizer):
        each.save_pretrained(folder)
    return folder, [[{"role": "user", "content": text}] for text in texts]


def read_chats(names: list[str]) -> list[list[dict]]:
    """Returns conversations up to the first answer. They end with it if `messages` has one."""
    chats = []
    for name in names:
        for messages in load_dataset("json", data_files=name, split="train")["messages"]:
            end = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
            chats.append(messages[: end + 1])
    return chats


def has_answer(chat: list[dict]) -> bool:
    return chat[-1]["role"] == "assistant"


def regenerate(target, tokenizer, chats, folder: Path, batch_size: int, seconds: float, seed: int) -> dict:
    """Answers as many prompts as time allows, in large batches."""
    start, output = time.monotonic(), Output(folder, {"temperature": TEMPERATURE})

    def length(chat):
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))

    chats = [chat for chat in chats if length(chat) <= LONGEST_PROMPT]
    random.Random(seed).shuffle(chats)
    generate = target.generate

    def generate_in_time(**kwargs):  # `regenerate_locally` takes several batches at once
        if time.monotonic() - start > seconds:
            raise TimeoutError
        return generate(**kwargs)

    with suppress(TimeoutError), patch.object(target, "generate", generate_in_time):
        regenerate_locally(
            target, tokenizer, output.pending([{"messages": chat} for chat in chats]), output, batch_size, do_sample=True,
            temperature=TEMPERATURE, top_k=0, max_new_tokens=ANSWER,
        )  # fmt: skip
    output.file.close()
    answers = [json.loads(line)["messages"][-1]["content"] for line in complete_lines(Path(output.file.name))]
    tokens = sum(map(len, tokenizer(answers, add_special_tokens=False)["input_ids"]))
    return {"rows": len(answers), "tokens": tokens, "seconds": time.monotonic() - start, "batch_size": batch_size}


def train(target, tokenizer, rows: list[list[dict]], folder: Path, args, seconds: float) -> dict:
    """Trains a draft for some seconds, on the answers only, and saves it."""
    dataset = Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in rows])
    batch_size, max_length = (2, 64) if args.tiny else (args.train_batch_size, 1024)
    arguments = Eagle3TrainingArguments(
        str(folder) + "-run",
        **{**SHORT, **BY_TIME, "packing_strategy": "bfd", "use_cpu": args.device == "cpu"},
        max_length=max_length,
        per_device_train_batch_size=batch_size,
        learning_rate=args.learning_rate,
        ttt_row_share=0.6,
        sampled_vocab_size=None if args.tiny else 4096,
        bf16=not args.tiny,
        seed=args.seed,
        dataloader_num_workers=0,
    )
    trainer = TimedEagle3Trainer(
        model=None, target_model=target, args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    start = time.monotonic()
    train_for(trainer, TimeBudget(seconds / 60, "Draft"))
    seconds = time.monotonic() - start
    draft = trainer.draft.to(target.dtype)
    draft.save_pretrained(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "tokens_per_step": batch_size * max_length,
        "rows": len(rows),
        "parameters": sum(each.numel() for each in draft.parameters()),
        "log": logs[-1] if logs else None,
    }


def measure(args, sections) -> None:
    folder, tiny = Path(args.output_dir), args.tiny
    # With the masks of padded batches, cuDNN's attention makes a new plan for each length, and may fail.
    torch.backends.cuda.enable_cudnn_sdp(False)
    name, chats = args.target, None if args.chats is None else read_chats(args.chats)
    if name is None:
        name, chats = tiny_target(folder / "tiny-target")
    dtype = torch.float32 if tiny else torch.bfloat16
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(args.device).eval()
    tokenizer = load_tokenizer(str(name))
    if args.prompts:
        files = [load_prompts(file, tokenizer, 16) for file in args.prompts]
        held_out = [prompt for each in zip(*files) for prompt in each]  # one of each file in turn
    else:
        number = min(64, len(chats) // 4)
        held_out, chats = chats[-number:], chats[:-number]
        held_out = [
            tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
            for chat in held_out
        ]
    prompts = [chat for chat in chats if not has_answer(chat) or not args.keep_answers]
    prompts = [chat[:-1] if has_answer(chat) else chat for chat in prompts]
    answered = [chat for chat in chats if has_answer(chat)] if args.keep_answers else []

    total = sections.seconds_left
    batch_size, seconds = (8 if tiny else 1024), args.answer_seconds or 0.15 * total
    answers = folder / "answers"
    sections.measure("answers", regenerate, target, tokenizer, prompts, answers, batch_size, seconds, args.seed)
    for path in answers.glob("rows-*.jsonl"):
        answered += [json.loads(line)["messages"] for line in complete_lines(path)]
    answered = [chat for chat in answered if chat[-1]["content"]]
    where = folder / "draft"
    seconds = args.draft_seconds or (3 if tiny else 0.33 * total)
    sections.measure("draft", train, target, tokenizer, answered, where, args, seconds)
    if not (where / "config.json").exists():
        return
    draft = Eagle3ForSpeculation.from_pretrained(where, dtype=dtype).to(args.device).eval()
    new_tokens, num_prompts = (12, 2) if tiny else (args.max_new_tokens, args.num_prompts)

    def benchmark(batch_size, methods, mode="eager", **settings):
        kept = {name: getattr(draft.generation_config, name) for name in settings}
        number = max(batch_size, num_prompts)
        batch = [held_out[i % len(held_out)] for i in range(number - number % batch_size)]
        draft.generation_config.update(**settings)
        try:
            results = run_benchmark(
                target,
                tokenizer,
                draft,
                {"chat": batch},
                methods,
                batch_sizes=(batch_size,),
                max_new_tokens=new_tokens,
                repeats=1,
                seed=args.seed,
                call=way_of(mode, tiny),
            )
        finally:
            draft.generation_config.update(**kept)
        return {"run": {**results.run, "environment": environment(args.device)}, "measurements": results.measurements}

    in_batches = ("plain", "eagle3-no-lookup", "eagle3")
    sections.measure("batch 1, eager", benchmark, 1, ("plain", *args.methods), seconds=5)
    for size in (4,) if tiny else (64, 16, 4):
        sections.measure(f"batch {size}, eager", benchmark, size, in_batches, seconds=5)
    for nodes in (8,) if tiny else (24, 60, 8):
        name, settings = f"batch 1, eager, every step a tree of {nodes}", {"tree_policy": "static"}
        methods = ("plain", "eagle3-no-lookup")
        sections.measure(name, benchmark, 1, methods, num_assistant_tokens=nodes, **settings)
    for size in (1,) if tiny else (1, 16):
        sections.measure(f"batch {size}, compiled", benchmark, size, in_batches, "compiled", seconds=0 if tiny else 30)


def render(results: dict) -> str:
    lines = []
    if answers := results.get("answers"):
        lines.append(
            f"Answers: {answers['rows']} prompts, {answers['tokens']} tokens in {answers['seconds']:.0f} s "
            f"({answers['tokens'] / answers['seconds']:.0f} a second, {answers['batch_size']} at a time, temperature "
            f"{TEMPERATURE})."
        )
    if draft := results.get("draft"):
        lines.append(
            f"Draft: {draft['steps']} steps of at most {draft['tokens_per_step']} tokens in {draft['seconds']:.0f} s, on "
            f"{draft['rows']} answers; {draft['parameters'] / 1e6:.0f} M parameters."
        )
    for name, result in results.items():
        if isinstance(result, dict) and "measurements" in result:
            rows = BenchmarkResults(result["run"], result["measurements"]).rows
            lines += [f"### {name.capitalize()}", format_table(rows)]
            lines += [
                f"{method} is left out: {reason}" for method, reason in result["run"].get("left_out", {}).items()
            ]
    return "\n\n".join(lines)


def plot(results: dict, folder: Path) -> list[Path]:
    """Plots speed-up and acceptance of eager calls, and speed-up against batch size."""
    eager = [result for name, result in results.items() if name.endswith(", eager")]
    measurements = [each for result in eager for each in result["measurements"]]
    return plot_all(BenchmarkResults(eager[0]["run"], measurements), folder) if eager else []
