"""
Is it right? A part of `gpu_report.py`: small random models must write the same texts with a draft as without.
"""

import contextlib
import copy
import functools
import importlib.util
import tempfile
import threading
import warnings

import torch
from low_precision import compare
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CompileConfig

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.devices_eagle3 import CudaGraph


SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,  # large, so that texts are neither constant nor full of near ties
}
WINDOW = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "query_pre_attn_scalar": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "initializer_range": 0.1,
}
FAMILIES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3, windows": ("gemma3_text", WINDOW),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_5, recurrent": ("qwen3_5_text", DELTA_RULE),
}
LENGTHS = {1: [40], 4: [40, 3, 17, 29]}  # of prompts, by batch size
NEW_TOKENS = 24


def make_small_pairing(kind: str, changes: dict, device: str, dtype=torch.float32):
    """Returns a random target, and an untrained draft that proposes the target's most frequent tokens. Some are accepted."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}), dtype=dtype)
    target = target.to(device).eval()
    batch = make_batch(LENGTHS[4], device)
    said = target.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)[:, max(LENGTHS[4]) :]
    tokens, counts = said.unique(return_counts=True)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=tokens[counts.argsort(descending=True)[:16]])
    draft.generation_config.branching_factor = 16
    draft.generation_config.tree_policy = "static"  # a tree in every step
    return target, draft.to(device).eval()


def make_batch(lengths: list[int], device: str) -> dict[str, torch.LongTensor]:
    """Returns prompts of several lengths, padded on the left."""
    longest, generator = max(lengths), torch.Generator().manual_seed(1)
    ids = torch.randint(2, SIZES["vocab_size"], (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def random_state(device: str) -> torch.Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()


def compare_texts(target, draft, batch, *, plain_call: dict | None = None, **call) -> dict:
    """Compares greedy and sampled text with and without the draft, and the generator's state after each."""
    device, result = target.device.type, {}
    for name, mode in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "top_k": 0})):
        outcomes = []
        for arguments in ({**call, **(plain_call or {})}, {**call, "assistant_model": draft}):
            torch.manual_seed(7)
            texts = target.generate(**batch, **{"max_new_tokens": NEW_TOKENS, **mode, **arguments})
            outcomes.append((texts.tolist(), random_state(device).tolist()))
        (plain, plain_state), (ours, our_state) = outcomes
        same = sum(a == b for a, b in zip(plain, ours))
        result |= {name: f"{same}/{len(plain)}", f"{name}_state": plain_state == our_state}
        result["is_right"] = result.get("is_right", True) and plain == ours and plain_state == our_state
    result["acceptance_length"] = draft.last_generation.acceptance_length
    return result


def caches(kind: str) -> dict[str, dict]:
    # On CUDA, transformers compiles calls with a static cache.
    static = {} if kind == "qwen3_5_text" else {"static": {"cache_implementation": "static", "disable_compile": True}}
    return {"dynamic": {}, **static}


def in_low_precision(device: str, max_new_tokens: int) -> dict:
    """In bfloat16 a text may part from the plain one only where two tokens are nearly tied."""
    target, draft = make_small_pairing("llama", {}, device, torch.bfloat16)
    prompts = [make_batch([length], device)["input_ids"] for length in (40, 17, 9)]
    rows = [compare(target, draft, prompt, max_new_tokens) for prompt in prompts]
    noise, gaps = max(row["noise"] for row in rows), [abs(row["gap"]) for row in rows if "gap" in row]
    return {
        "is_right": all(gap <= 2 * noise for gap in gaps),
        "texts": len(rows),
        "differing": len(gaps),
        "largest_gap": max(gaps, default=None),
        "noise": noise,
    }


def as_remote_code(target, draft, batch) -> dict:
    """Saves the draft, and loads it with the code that was saved with it."""
    with tempfile.TemporaryDirectory() as folder:
        draft.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=target.dtype).to(target.device).eval()
        result = compare_texts(target, loaded, batch)
    result["is_right"] &= type(loaded).__module__.startswith("transformers_modules")
    return result


def with_prompt_on_host(target, draft) -> dict:
    """A call takes a prompt on the CPU, as plain `generate` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare_texts(target, draft, make_batch(LENGTHS[1], "cpu"))


def while_memory_moves(target, draft, batch, **call) -> dict:
    """Calls with static caches, whose addresses differ. Graphs that others captured are captured anew between ours."""
    draft.generation_config.tree_policy = "auto"  # remembers from the second call on that trees pay, or do not
    try:
        held, results = [], []
        for megabytes in (1, 48, 3):
            results.append(compare_texts(target, draft, batch, **{"max_new_tokens": 64, **call}))
            held.append(torch.ones(megabytes << 20, dtype=torch.uint8, device=target.device))
    finally:
        draft.generation_config.tree_policy = "static"
    return {**results[-1], "is_right": all(result["is_right"] for result in results)}


def after_a_failed_capture(target, draft, batch) -> dict:
    """A draft that syncs cannot be captured. Decoding and sampling go on, and later drafts are not captured."""
    handle = draft.register_forward_hook(lambda module, inputs, output: output.logits.sum().item() and None)
    try:
        result = compare_texts(target, draft, batch)
    finally:
        handle.remove()
    torch.manual_seed(7)
    result["draws"] = torch.rand(3, device=target.device).isfinite().all().item()
    result["was_captured"] = not CudaGraph.has_failed
    return result


def in_two_streams(target, draft, batch) -> dict:
    """Two threads generate at once, each in its own stream. One samples, too. Both capture graphs."""
    module, texts, errors = torch.get_device_module(target.device), {}, []
    expected = target.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    module.synchronize()

    def generate(name):
        try:
            with module.stream(module.Stream()):
                for _ in range(4):
                    text = target.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft)
                    texts.setdefault(name, []).append(text.cpu())
                    if name == 0:
                        target.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=True, assistant_model=draft)
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=generate, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = [text.equal(expected.cpu()) for each in texts.values() for text in each]
    is_right = len(same) == 8 and all(same) and not CudaGraph.has_failed
    return {
        "is_right": is_right,
        "texts": len(same),
        "same": sum(same),
        "errors": errors,
        "captured": not CudaGraph.has_failed,
    }


def attention_in_training(device: str, tiny: bool) -> dict:
    """Compares outputs and gradients of an unroll's compiled flex attention with the chunked reference in float64."""
    from hf_eagle3.training.attention import (
        attend_by_flex,
        causal_block_mask,
        chunked_attention,
        compiled_flex,
        merged_attention,
        padded_length,
    )

    torch.manual_seed(0)
    length, steps = (256 if tiny else 640), 3
    documents = (torch.arange(length, device=device) // (length // 3))[None]
    query = torch.randn(1, 8, length, 64, device=device)
    text = [torch.randn(1, 2, length, 64, device=device) for _ in ("keys", "values")]
    own = [torch.randn(1, 2, length, steps - 1, 64, device=device) for _ in ("keys", "values")]
    upstream = torch.randn_like(query)

    has_backward = device != "cpu"  # of flex attention

    def run(attend, dtype):
        inputs = [each.to(dtype, copy=True).requires_grad_(has_backward) for each in (query, *text, *own)]
        output = attend(inputs[:3], tuple(inputs[3:]))
        if not has_backward:
            return [output]
        output.backward(upstream.to(dtype))
        return [output, *(each.grad for each in inputs)]

    reference = run(lambda of_text, own: chunked_attention(*of_text, documents, 0.125, own), torch.float64)
    mask = causal_block_mask(documents, padded_length(length))
    attend = attend_by_flex if tiny else compiled_flex()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        actual = run(lambda of_text, own: merged_attention(*of_text, mask, 0.125, own, attend), dtype)
        distances = [(a.double() - b).norm() / b.norm() for a, b in zip(actual, reference)]
        errors[str(dtype).removeprefix("torch.")] = max(distance.item() for distance in distances)
    return {"is_right": errors["float32"] < 1e-3 and errors["bfloat16"] < 2e-2, **errors}


def learning(device: str, length: int) -> dict:
    """Trains a few steps on one batch, with Muon under bfloat16 autocast. The loss must fall, and nothing may be NaN."""
    from training_step import random_batch

    from hf_eagle3.training.optimizer import MuonWithAdamW, split_parameters
    from hf_eagle3.training.ttt import ttt_loss

    target, draft = make_small_pairing("llama", {}, device)
    draft = draft.float().train()
    batch = random_batch(draft, SIZES["vocab_size"], length, 64)
    matrices, others = split_parameters(draft.named_parameters(), exclude=("lm_head",))
    optimizer, losses = MuonWithAdamW(matrices, others, lr=1e-2), []
    for _ in range(8):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = ttt_loss(draft, batch, 3).loss_sums.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    is_finite = all(each.isfinite().all() for each in draft.parameters())
    return {"is_right": bool(is_finite) and losses[-1] < 0.9 * losses[0], "first_loss": losses[0], "last": losses[-1]}


@contextlib.contextmanager
def exact_float32():
    """Matrix products in full float32, not in TF32."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)


def measure(args, sections) -> None:
    device = torch.device(args.device).type
    depth, some, short = (3, 0, {"max_new_tokens": 10}) if args.tiny else (8, 5, {})
    with exact_float32():

        @functools.cache
        def pairing(name):
            return make_small_pairing(*FAMILIES[name], device)

        def on_family(check, name, *args, **kwargs):
            target, draft = pairing(name)
            draft.generation_config.tree_depth = depth
            return check(target, draft, *args, **kwargs)

        few = ("gemma3, windows", "qwen3_5, recurrent")  # for a rehearsal
        for name, (kind, _) in FAMILIES.items():
            if args.tiny and name not in few:
                continue
            for (size, lengths), (cache, call) in (
                (each, cache) for each in LENGTHS.items() for cache in caches(kind).items()
            ):
                section = f"{name}, batch {size}, {cache} cache"
                batch = make_batch(lengths, device)
                sections.measure(section, on_family, compare_texts, name, batch, **short, **call)
        batch = make_batch(LENGTHS[1], device)
        sections.measure("remote code from a saved folder", on_family, as_remote_code, "llama", batch)
        sections.measure("bfloat16 (near ties only)", in_low_precision, device, 12 if args.tiny else 48)
        sections.measure("prompt on the host", on_family, with_prompt_on_host, "qwen3")
        if device != "cpu":
            sections.measure("two threads, each with its stream", on_family, in_two_streams, "llama", batch)
        if importlib.util.find_spec("trl") is not None:
            sections.measure("flex attention in training", attention_in_training, device, args.tiny, seconds=8 * some)
            sections.measure("Muon, bfloat16 autocast", learning, device, 64 if args.tiny else 256, seconds=some)
        compiler = CompileConfig(backend="eager", mode=None) if args.tiny else CompileConfig()
        compiler._compile_all_devices = True
        call = {"cache_implementation": "static", "compile_config": compiler}

        def compare_compiled(target, draft):
            draft.generation_config.tree_depth = 2 if args.tiny else 4  # each level of a tree is compiled
            # A compiled plain call rounds differently, so the reference is eager.
            return compare_texts(target, draft, batch, plain_call={"disable_compile": True}, **call)

        for name in ("llama", "gemma3, windows")[: 1 if args.tiny else 2]:
            sections.measure(f"{name}, compiled, static cache", on_family, compare_compiled, name, seconds=5 * some)
        static = {"cache_implementation": "static", "disable_compile": True}
        sections.measure(
            "static caches at other addresses", on_family, while_memory_moves, "llama", batch, **static, **short
        )
        # Last, because it turns off graphs in this process.
        sections.measure("a capture that fails", on_family, after_a_failed_capture, "llama", batch)


def render(results: dict) -> str:
    lines = [
        "Float32, TF32 off. Texts with a draft are compared with plain `generate`, and so is the generator's state after them.",
        "",
    ]
    lines += ["| check | right | details |", "| --- | --- | --- |"]
    for name, result in results.items():
        result = copy.copy(result)
        is_right = "yes" if result.pop("is_right") else "**NO**"
        details = ", ".join(
            f"{key.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
            for key, value in result.items()
        )
        lines.append(f"| {name} | {is_right} | {details} |")
    return "\n".join(lines)
