# /// script
# dependencies = ["hf-eagle3[train]", "speculators"]
# ///
r"""
Trains drafts as this library and others train them, for the same time on the same data, and verifies them in one loop.

    pip install speculators
    python experiments/train_against.py --target path/to/target --dataset texts.jsonl --prompts prompts.jsonl \
        --minutes 10 --output_dir outputs/against

    hf-eagle3      as `recipes/quickstart.py` trains
    speculators    draft class and loss of the `speculators` package, with the defaults of its training: Llama layer, norms
                   before fc and of the output, head of the target, three drafting steps of equal weight, Muon at 1e-3,
                   linear schedule, 8,192 tokens a step (`--seq_len`), in its eager attention and loss where there is no GPU
    specforge      the settings of SpecForge's training in our trainer: classic form, seven drafting steps, AdamW at 1e-4,
                   2,048 tokens a step. SpecForge's head begins at random; here it begins as the target's

Without bfloat16 units, Muon orthogonalizes in float32 for all of them (`hf_eagle3.training.optimizer`). Trained drafts stay
in the folder. After an interruption, the same command goes on.
"""

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from paper_table import settle_arguments, texts_of
from transformers import AutoModelForCausalLM, set_seed

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.data import count_tokens, most_frequent_tokens
from hf_eagle3.environment import environment
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.evaluation.results import acceptance_length, markdown_table
from hf_eagle3.remote_code.outputs_eagle3 import aux_hidden_states, select_hidden_states
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training.budget import BY_TIME, SHORT, TimeBudget, TimedEagle3Trainer, train_for
from hf_eagle3.training.optimizer import MuonWithAdamW, split_parameters


def make_trainer(target, tokenizer, dataset, args, cls=TimedEagle3Trainer, **settings) -> Eagle3Trainer:
    settings = {"max_length": args.max_length, **SHORT, **settings}
    return cls(
        model=None,
        target_model=target,
        args=Eagle3TrainingArguments(
            str(Path(args.output_dir) / "run"),
            draft_vocab_size=args.draft_vocab_size,
            bf16=args.bf16,
            seed=args.seed,
            **BY_TIME,
            **settings,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )


def ours(target, tokenizer, dataset, folder, args):
    trainer = make_trainer(
        target,
        tokenizer,
        dataset,
        args,
        learning_rate=5e-3,
        ttt_steps=5,
        model_init_kwargs={"model_type": "qwen3"},
        per_device_train_batch_size=args.batch_size,
    )
    train_for(trainer, TimeBudget(args.minutes, "hf-eagle3"))
    trainer.draft.to(target.dtype).save_pretrained(folder)
    return trainer.state.global_step, args.batch_size * args.max_length


def specforge(target, tokenizer, dataset, folder, args):
    trainer = make_trainer(
        target,
        tokenizer,
        dataset,
        args,
        max_length=2048,
        per_device_train_batch_size=1,
        draft_form="classic",
        use_muon=False,
        learning_rate=1e-4,
        adam_beta2=0.999,
        ttt_steps=7,
        ttt_warmup=0.0,
    )
    train_for(trainer, TimeBudget(args.minutes, "SpecForge"))
    trainer.draft.to(target.dtype).save_pretrained(folder)
    return trainer.state.global_step, 2048


def speculators(target, tokenizer, dataset, folder, args):
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    num_layers, on_gpu = target.config.get_text_config(decoder=True).num_hidden_layers, torch.cuda.is_available()
    vocab_size, layer_ids = target.config.vocab_size, [2, num_layers // 2, num_layers - 3]
    # The rows of our own trainer, so that the data are the same.
    rows = make_trainer(target, tokenizer, dataset, args, Eagle3Trainer).train_dataset
    rows = [row for row in rows["input_ids"] if len(row) == args.max_length]
    counts = count_tokens(Dataset.from_dict({"input_ids": rows}), vocab_size)
    kept = torch.tensor(most_frequent_tokens(counts, args.draft_vocab_size))
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[kept] = True
    torch.manual_seed(args.seed)
    draft = Eagle3DraftModel.from_training_args(
        create_transformer_layer_config(args.target, 1, "llama", None, 2048, full_attention_indices=[0]),
        t2d=known,
        d2t=kept - torch.arange(len(kept)),
        draft_vocab_size=len(kept),
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        ttt_steps=3,
        target_layer_ids=layer_ids,
        verifier_name_or_path=args.target,
        **({} if on_gpu else {"draft_attn_impl": "eager"}),
    ).to(target.device, torch.float32)
    loss_config = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")
    trained = [each for each in draft.named_parameters() if each[1].requires_grad]
    matrices, others = split_parameters(trained)
    optimizer = MuonWithAdamW(matrices, others, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999))
    for group in optimizer.param_groups[1:]:
        group["weight_decay"] = 0.01
    before_norm = []
    handle = target.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))

    order, step = torch.Generator().manual_seed(args.seed), 0
    in_a_step, queue = max(args.seq_len // args.max_length, 1), []
    seconds, start = 60 * args.minutes, time.monotonic()
    while (elapsed := (time.monotonic() - start) / seconds) < 1:
        if len(queue) < in_a_step:
            queue += torch.randperm(len(rows), generator=order).tolist()
        batch = torch.tensor([rows[queue.pop(0)] for _ in range(in_a_step)], device=target.device)
        with torch.no_grad():
            outputs = target.model(batch, output_hidden_states=select_hidden_states(layer_ids), use_cache=False)
            aux = aux_hidden_states(outputs, layer_ids, num_layers).float()
        last = before_norm.pop().float()
        # As it shifts: (x1, g0, y1) in each document, from position 1 on.
        positions = torch.arange(1, args.max_length, device=batch.device).expand(in_a_step, -1)
        documents = torch.arange(in_a_step, device=batch.device)[:, None].expand_as(positions)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=args.bf16):
            _, loss, _ = draft(
                hidden_states=aux[:, :-1].flatten(0, 1)[None],
                input_ids=batch[:, 1:].flatten()[None],
                document_ids=documents.flatten()[None],
                loss_mask=torch.ones_like(batch[:, 1:], dtype=torch.bool).flatten()[None],
                position_ids=positions.flatten()[None],
                verifier_last_hidden_states=last[:, 1:].flatten(0, 1)[None],
                ttt_steps=3,
                ttt_step_loss_decay=1.0,
                loss_config=loss_config,
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for group in optimizer.param_groups:  # linear, after a warm-up of a hundredth
            group["lr"] = 1e-3 * min(elapsed / 0.01, (1 - elapsed) / 0.99)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"speculators: {elapsed:.0%}, step {step}, loss {loss.item():.2f}", flush=True)
    handle.remove()
    if not math.isfinite(loss.item()):
        raise SystemExit(f"speculators: the loss is {loss.item()}. Its draft is not saved.")
    draft.save_pretrained(folder)
    return step, in_a_step * args.max_length


@torch.no_grad()
def tree_acceptance_length(target, draft, prompts: list[list[int]], temperature: float, max_new_tokens: int) -> float:
    """The pooled acceptance length, with a whole tree in every step. Samples come from the whole vocabulary."""
    draft.generation_config.tree_policy, draft.generation_config.assistant_confidence_threshold = "static", 0.0
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings, lengths = {"max_new_tokens": max_new_tokens, **sampling}, Counter()
    set_seed(0)
    for prompt in prompts:
        inputs = torch.tensor([prompt], device=target.device)
        target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=draft, **settings)
        lengths.update(draft.last_generation.accepted_lengths)
    return acceptance_length(lengths)


METHODS = {"hf-eagle3": ours, "speculators": speculators, "specforge": specforge}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--dataset", required=True, help='JSON Lines file of {"text": "..."}, or Hub id')
    parser.add_argument("--prompts", required=True, help='Held-out prompts, one {"prompt": "..."} a line')
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--output_dir", default="outputs/against")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--draft_vocab_size", type=int, default=4096)
    parser.add_argument("--max_length", type=int, default=256, help="Length of documents")
    parser.add_argument("--batch_size", type=int, default=1, help="Documents a step of hf-eagle3")
    parser.add_argument("--seq_len", type=int, default=8192, help="Tokens a step of speculators")
    parser.add_argument("--num_prompts", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto", help="Dtype of the target")
    parser.add_argument("--bf16", action="store_true", help="Train in mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer, dataset = load_tokenizer(args.target), texts_of(args.dataset)
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    settle_arguments(Path(args.output_dir), args, {"prompts": prompts})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for method in args.methods:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(device)
        folder = Path(args.output_dir) / method
        if not (folder / "facts.json").exists():
            facts = METHODS[method](target, tokenizer, dataset, folder, args)
            (folder / "facts.json").write_text(json.dumps(facts))
        steps, tokens = json.loads((folder / "facts.json").read_text())
        draft = Eagle3ForSpeculation.from_pretrained(folder, dtype=target.dtype).to(device).eval()
        lengths = [tree_acceptance_length(target, draft, prompts, T, args.max_new_tokens) for T in (0, 1)]
        rows.append([method, f"{steps:,}", f"{steps * tokens:,}", *(f"{length:.2f}" for length in lengths)])
    print(markdown_table(["trained as", "steps", "tokens", "acceptance length, T=0", "T=1"], rows))
    print(f"{vars(args)}, {environment(device)}")


if __name__ == "__main__":
    main()
