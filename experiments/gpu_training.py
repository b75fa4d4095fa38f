"""
How fast is training? A part of `gpu_report.py`: the parts of a step for a small target with random weights, and the unroll
of a draft of Qwen3-8B's size from random states, without its target.
"""

import contextlib
import gc
import random
import tempfile
import time
from collections import defaultdict
from unittest import mock

import torch
from datasets import Dataset
from gpu_steps import QWEN3_8B, SMOLLM2_135M, TINY, kernels, make_pairing, median_ms
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from training_step import random_batch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.memory import peak_memory, reset_peak_memory
from hf_eagle3.training import attention, ttt
from hf_eagle3.training.optimizer import MuonWithAdamW, split_parameters


class TrainerInParts(Eagle3Trainer):
    """Measures the parts of its steps, with a synchronization after each part."""

    def __init__(self, *args, **kwargs):
        self.seconds, self.is_measured = defaultdict(float), False
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def part(self, name):
        if not self.is_measured:
            yield
            return
        synchronize(self.args.device)
        start = time.perf_counter()
        yield
        synchronize(self.args.device)
        self.seconds[name] += time.perf_counter() - start

    def get_batch_samples(self, *args, **kwargs):
        with self.part("data"):
            return super().get_batch_samples(*args, **kwargs)

    def target_batch(self, inputs):
        with self.part("target"):
            return super().target_batch(inputs)

    def compute_loss(self, *args, **kwargs):
        with self.part("target and unroll"):
            return super().compute_loss(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        step, backward = optimizer.step, self.accelerator.backward

        def timed_step(*args, **kwargs):
            with self.part("optimizer"):
                return step(*args, **kwargs)

        def timed_backward(*args, **kwargs):
            with self.part("backward"):
                return backward(*args, **kwargs)

        optimizer.step, self.accelerator.backward = timed_step, timed_backward
        return optimizer


class Phases(TrainerCallback):
    """Measures some steps in parts, and then some without a synchronization, under a profiler if there is a CUDA device."""

    def __init__(self, trainer, warmups: int, steps: int):
        self.trainer, self.begin, self.steps, self.results = trainer, warmups, steps, {}

    def on_step_begin(self, args, state, control, **kwargs):
        trainer, number = self.trainer, state.global_step - self.begin
        if number == 0:
            trainer.is_measured = True
        elif number == self.steps:
            trainer.is_measured = False
            self.results["parts"] = {name: seconds / self.steps for name, seconds in trainer.seconds.items()}
        if number in (self.steps, 2 * self.steps):
            synchronize(args.device)
            self.start = time.perf_counter()
        if number == 2 * self.steps and args.device.type == "cuda":
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        number = state.global_step - self.begin
        if number == 2 * self.steps:
            synchronize(args.device)
            self.results["seconds"] = (time.perf_counter() - self.start) / self.steps
        if number == 3 * self.steps and args.device.type == "cuda":
            synchronize(args.device)
            self.profile.stop()
            self.results["device"] = kernels(self.profile, self.steps)


def trainer_steps(args, batch_size: int, lengths: tuple[int, int], max_length: int, steps: int) -> dict:
    """
    Returns seconds of a step of `Eagle3Trainer` over `batch_size` packed rows, and of its parts, for a random target of
    SmolLM2-135M's size.
    """
    sizes = TINY if args.tiny else SMOLLM2_135M
    words = {f"t{i}": i for i in range(sizes["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "t0")), pad_token="t0", eos_token="t1"
    )
    with torch.device(args.device):
        target = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **sizes), dtype=torch.float32 if args.tiny else torch.bfloat16
        )
    rng = random.Random(0)
    rows = [
        [rng.randrange(2, sizes["vocab_size"]) for _ in range(rng.randint(*lengths))] for _ in range(40 * batch_size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = Eagle3TrainingArguments(
            folder,
            max_steps=2 + 3 * steps,
            per_device_train_batch_size=batch_size,
            max_length=max_length,
            packing=True,
            ttt_row_share=0.6,
            sampled_vocab_size=None if args.tiny else 4096,
            bf16=not args.tiny,
            use_cpu=args.device == "cpu",
            save_strategy="no",
            report_to="none",
            dataloader_num_workers=0,
        )
        trainer = TrainerInParts(
            model=None,
            target_model=target.eval(),
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
        )
        phases = Phases(trainer, 2, steps)
        trainer.add_callback(phases)
        trainer.train()
    return {"tokens": batch_size * max_length, **phases.results}


def measure(args, sections) -> None:
    device, tiny = torch.device(args.device), args.tiny
    sizes = ((20, 60), 64, 1) if tiny else ((200, 900), 1024, 4)
    for rows in (2,) if tiny else (8, 32):
        sections.measure(
            f"a step of the trainer, {rows} rows", trainer_steps, args, rows, *sizes, seconds=0 if tiny else 20
        )
    sizes = TINY if tiny else QWEN3_8B
    # Of the target, only the embedding and the head run. Its layers are only counted.
    config = AutoConfig.for_model("qwen3", **{**sizes, "num_hidden_layers": 8})
    target, draft = make_pairing(config, args.device, torch.bfloat16, 32 if tiny else 32000)
    target.model.layers = None
    draft = draft.float().train()
    draft.borrow_embeddings(target)
    matrices, others = split_parameters(draft.named_parameters(), exclude=("lm_head",))
    optimizer = MuonWithAdamW(matrices, others, lr=1e-4)
    steps, documents = (2, 64) if tiny else (7, 1024)

    def step(length, repeats):
        gc.collect()
        batch = random_batch(draft, config.vocab_size, length, documents)
        counts = reset_peak_memory(device)

        def unroll():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = ttt.ttt_loss(draft, batch, steps).loss_sums.sum()
            loss.backward()

        seconds = median_ms(unroll, device, repeats) / 1000
        optimizer.zero_grad()
        peak = peak_memory(device) if counts else None
        return {"seconds": seconds, "tokens_per_s": length / seconds, "peak": peak}

    def block_wise(length, repeats):
        with mock.patch.object(attention, "causal_block_mask", lambda documents, length: None):
            return step(length, repeats)

    lengths = (64, 128) if tiny else (2048, 8192, 32768)
    for length in lengths:
        sections.measure(f"flex attention, {length} tokens", step, length, 3, seconds=5)

    def optimize():
        for each in draft.parameters():
            each.grad = torch.randn_like(each)
        milliseconds = median_ms(optimizer.step, device, 3)
        optimizer.zero_grad()
        return {"seconds": milliseconds / 1000}

    sections.measure("optimizer (Muon and AdamW)", optimize, seconds=2)
    for length in lengths[:2]:
        sections.measure(f"block by block, {length} tokens", block_wise, length, 2, seconds=5)


def render(results: dict) -> str:
    lines = []
    for name in (name for name in results if name.startswith("a step of the trainer")):
        step = results[name]
        lines += [
            f"A step of the trainer over {step['tokens']} tokens takes {step['seconds']:.3f} s (a random target of "
            "SmolLM2-135M's size, 60% of the rows, 4,096 sampled tokens). With a synchronization after each part: "
            + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in step["parts"].items())
            + ".",
            "",
        ]
        if facts := step.get("device"):
            lines += [f"Kernels run for {facts['busy_ms']:.0f} ms of it, {facts['kernels']:.0f} of them.", ""]
    lines += [
        "Forward and backward of the unroll, bfloat16 autocast, seven drafting steps, documents of 1,024 tokens.",
        "",
    ]
    lines += ["| attention, tokens | seconds | tokens per second | peak memory, MiB |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        if "tokens_per_s" in result:
            peak = "-" if result["peak"] is None else f"{result['peak']:.0f}"
            lines.append(f"| {name} | {result['seconds']:.3f} | {result['tokens_per_s']:.0f} | {peak} |")
    if optimizer := results.get("optimizer (Muon and AdamW)"):
        lines += ["", f"A step of the optimizer takes {optimizer['seconds']:.3f} s."]
    return "\n".join(lines)
