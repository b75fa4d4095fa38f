"""
How fast is training? A part of `gpu_report.py`: the unroll of a draft of Qwen3-8B's size, from random states.

The target's own forward is not measured.
"""

import gc
import statistics
import time
from unittest import mock

import torch
from gpu_steps import QWEN3_8B, TINY, make_pairing
from training_step import random_batch
from transformers import AutoConfig

from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.memory import peak_memory, reset_peak_memory
from hf_eagle3.training import ttt
from hf_eagle3.training.optimizer import MuonWithAdamW


def measure(args, sections) -> None:
    device, tiny = torch.device(args.device), args.tiny
    sizes = TINY if tiny else QWEN3_8B
    # Of the target, only the embedding and the head run. Its layers are only counted.
    config = AutoConfig.for_model("qwen3", **{**sizes, "num_hidden_layers": 8})
    target, draft = make_pairing(config, args.device, torch.bfloat16, 32 if tiny else 32000)
    target.model.layers = None
    draft = draft.float().train()
    draft.borrow_embeddings(target)
    matrices = [each for name, each in draft.named_parameters() if each.dim() == 2 and "lm_head" not in name]
    others = [each for name, each in draft.named_parameters() if each.dim() != 2 or "lm_head" in name]
    optimizer = MuonWithAdamW(matrices, others, lr=1e-4)
    steps, documents = (2, 64) if tiny else (7, 1024)

    def step(length, repeats):
        batch, seconds = random_batch(draft, config.vocab_size, length, documents), []
        counts = reset_peak_memory(device)
        for repeat in range(repeats + 1):
            synchronize(device)
            start = time.perf_counter()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = ttt.ttt_loss(draft, batch, steps).loss_sums.sum()
            loss.backward()
            synchronize(device)
            if repeat > 0:
                seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
        peak = peak_memory(device) if counts else None
        del batch, loss
        gc.collect()
        return {
            "seconds": statistics.median(seconds),
            "tokens_per_s": length / statistics.median(seconds),
            "peak": peak,
        }

    def block_wise(length, repeats):
        with mock.patch.object(ttt, "causal_block_mask", lambda documents, length: None):
            return step(length, repeats)

    lengths = (64, 128) if tiny else (2048, 8192, 32768)
    for length in lengths:
        sections.measure(f"flex attention, {length} tokens", step, length, 3, seconds=5)

    def optimize():
        for each in draft.parameters():
            each.grad = torch.randn_like(each)
        seconds = []
        for _ in range(4):
            synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
        return {"seconds": statistics.median(seconds[1:])}

    sections.measure("optimizer (Muon and AdamW)", optimize, seconds=2)
    for length in lengths[:2]:
        sections.measure(f"block by block, {length} tokens", block_wise, length, 2, seconds=5)


def render(results: dict) -> str:
    lines = [
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
