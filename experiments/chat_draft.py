# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Compares settings of training on conversations, at equal tokens, by what drafts predict of held-out answers.

    python experiments/chat_draft.py --target HuggingFaceTB/SmolLM2-135M-Instruct --dataset chats.jsonl \
        --features_dir features --json results.jsonl --settings "" "learning_rate=5e-3" "ttt_steps=5 ttt_warmup=0"

Each setting is a list of `name=value`: fields of `Eagle3TrainingArguments`, those of a fresh draft (`draft.model_type=llama`), or

    tokens=1024      tokens of a step; rows are packed to `--max_length` tokens
    learned=answers  what is learned: the `answers`, `half` of the prompts' tokens besides, or `all` tokens
    passes=1         how often the data come; each time an equal part of them less
    seed=0

Defaults are those of the quickstart. The target reads the data once, and keeps its states in the folder. Each draft is
measured on the last `--num_held_out` conversations, which are not trained on: how often its first and its first four tokens
have the target's most probable token among them, and how often samples agree, by drafting step. From these follow the mean
lengths of chains at temperatures 0 and 1. `--drafts` measures finished drafts in the same way. What is in the JSON file
already is not trained and measured again.
"""

import argparse
import hashlib
import json
import shlex
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.data import count_tokens, most_frequent_tokens
from hf_eagle3.evaluation.drafts import load_draft, sampled_digest
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training import FeatureStore
from hf_eagle3.training.losses import acceptance_rates, probabilities
from hf_eagle3.training.ttt import TTTBatch, counted_rows, ttt_unroll


DEFAULTS = {
    "learning_rate": 1e-2,
    "ttt_steps": 5,
    "ttt_warmup": 0.8,
    "ttt_row_share": 0.6,
    "sampled_vocab_size": 1024,
    "draft_vocab_size": 32000,
    "warmup_steps": 20,
    "draft.model_type": "qwen3",
    "tokens": 1024,
    "learned": "answers",
    "passes": 1,
    "seed": 0,
}
EVALUATED_STEPS = 5
ONE_IN = 16  # rows of which the agreement of samples is computed: sorting a vocabulary takes long


def parse_setting(text: str) -> dict:
    setting = {}
    for part in shlex.split(text):
        name, _, value = part.partition("=")
        try:
            setting[name] = json.loads(value)
        except ValueError:
            setting[name] = value
    return setting


def of_layers(args) -> dict:
    """Fields of a fresh draft that reads the states of `--layer_ids`."""
    return {} if args.layer_ids is None else {"eagle_aux_hidden_state_layer_ids": args.layer_ids}


def arguments(folder: str, args, **settings) -> Eagle3TrainingArguments:
    return Eagle3TrainingArguments(
        folder,
        assistant_only_loss=True,  # features know it; `learned` may change the labels
        bf16=args.bf16,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
        **settings,
    )


def features(target, tokenizer, conversations: Dataset, folder: str, args) -> FeatureStore:
    """The target's states on packed rows, of which `answer_labels` and `labels` say what may be learned."""
    with tempfile.TemporaryDirectory() as run:
        settings = arguments(run, args, packing=True, max_length=args.max_length, model_init_kwargs=of_layers(args))
        trainer = Eagle3Trainer(
            None, target, settings, train_dataset=conversations.select_columns("messages"), processing_class=tokenizer
        )
        return trainer.extract_features(folder, rows_per_shard=256)


def learned(rows: Dataset, what: str) -> Dataset:
    """Rows with labels for the answers (as they were extracted), `all` tokens, or the answers and `half` of the others."""
    generator = torch.Generator().manual_seed(0)

    def relabel(row):
        tokens, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        kept = torch.rand(len(tokens), generator=generator) < {"half": 0.5, "all": 1.0}[what]
        return {"labels": torch.where(kept, tokens, labels).tolist()}

    return rows if what == "answers" else rows.map(relabel, load_from_cache_file=False)


def train(target, tokenizer, store: FeatureStore, setting: dict, args) -> Eagle3ForSpeculation:
    settings = DEFAULTS | setting
    of_draft = {name.partition(".")[2]: settings.pop(name) for name in list(settings) if name.startswith("draft.")}
    rows = settings.pop("tokens") // args.max_length
    passes, whole_rows = settings.pop("passes"), store.rows
    num_steps = args.tokens // (rows * args.max_length)
    num_rows = num_steps * rows // passes
    if num_rows > len(whole_rows):
        raise SystemExit(f"{args.tokens} tokens are more than the {len(whole_rows)} rows of {store.folder} have.")
    torch.manual_seed(settings["seed"])
    kept = torch.randperm(len(whole_rows), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
    store.rows = learned(whole_rows, settings.pop("learned"))
    counts = count_tokens(store.rows, target.config.vocab_size)
    vocabulary = most_frequent_tokens(counts, settings.pop("draft_vocab_size"))
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=vocabulary, **of_layers(args), **of_draft)
    all_rows = store.dataset
    store.dataset = lambda: all_rows().select(kept)
    with tempfile.TemporaryDirectory() as run:
        trainer = Eagle3Trainer(
            draft,
            target,
            arguments(
                run,
                args,
                max_length=args.max_length,
                per_device_train_batch_size=rows,
                num_train_epochs=passes,
                **settings,
            ),
            train_dataset=store,
            processing_class=tokenizer,
        )
        trainer.train()
    store.rows = whole_rows
    del store.dataset
    return draft.eval()


class HeldOut:
    """Batches of conversations and the target's states on them."""

    def __init__(self, target, tokenizer, conversations: Dataset, args):
        with tempfile.TemporaryDirectory() as run:
            settings = arguments(run, args, max_length=2 * args.max_length, model_init_kwargs=of_layers(args))
            self.trainer = Eagle3Trainer(
                None,
                target,
                settings,
                train_dataset=conversations.select_columns("messages"),
                processing_class=tokenizer,
            )
        self.batches = []
        for batch in self.trainer.get_eval_dataloader(self.trainer.train_dataset):
            self.batches.append((batch, *self.trainer.target_states(batch)))

    @torch.no_grad()
    def measure(self, draft, args) -> dict[str, list[float]]:
        sums = torch.zeros(4, EVALUATED_STEPS, dtype=torch.double)
        draft.validate_target(self.trainer.target_model)
        if (layer_ids := draft.resolve_aux_layer_ids(self.trainer.target_model)) != self.trainer.aux_layer_ids:
            raise SystemExit(
                f"{draft.name_or_path} reads states {layer_ids}. This measures drafts that read {self.trainer.aux_layer_ids}."
            )
        draft.borrow_embeddings(self.trainer.target_model)
        token_ids, device = draft.draft_token_ids, draft.lm_head.weight.device
        place_of = torch.full((draft.config.vocab_size,), -1, device=device)
        place_of[token_ids] = torch.arange(len(token_ids), device=device)
        for inputs, aux, last in self.batches:
            distributions = self.trainer.target_states.distributions(last, token_ids)
            batch = TTTBatch.of(inputs, aux.to(draft.dtype), distributions, inputs["labels"])
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                states = [step.states for step in ttt_unroll(draft, batch, EVALUATED_STEPS)]
            for step, of_step in enumerate(states):
                rows = counted_rows(batch.labels, batch.documents, step)
                about = slice(1 + step, 1 + step + rows.shape[1])
                with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                    logits = draft.lm_head(of_step[:, : rows.shape[1]][rows])
                place = place_of[batch.target_tokens[:, about][rows]]
                score = logits.gather(1, place.clamp(min=0)[:, None])
                rank = (logits > score).sum(dim=1).masked_fill(place < 0, logits.shape[1])
                some = slice(None, None, ONE_IN)
                probs, _ = probabilities(batch.target_logits[:, about][rows][some])
                rates = acceptance_rates(logits[some], probs, batch.target_mass[:, about][rows][some])
                counts = (rank == 0).sum(), (rank < 4).sum(), ONE_IN * rates.sum(), rows.sum()
                sums[:, step] += torch.stack(counts).cpu()
        shares = (sums[:3] / sums[3]).tolist()
        return dict(zip(("top_1", "top_4", "agreed"), shares))


def chain_length(shares: list[float]) -> float:
    """Mean length of a chain of which each token is right with these probabilities, and of the target's token after it."""
    return 1 + torch.tensor(shares).cumprod(0).sum().item()


def line(result: dict) -> str:
    shares = [
        f"{100 * result[name][step]:.1f}" for name, step in (("top_1", 0), ("top_4", 0), ("top_1", 2), ("top_1", 4))
    ]
    lengths = [f"{chain_length(result[name]):.3f}" for name in ("top_1", "top_4", "agreed")]
    tokens = "-" if result["tokens"] is None else f"{result['tokens']:,}"
    return f"| {result['setting'] or 'defaults'} | {tokens} | {' | '.join(shares + lengths)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--dataset", required=True, help='JSON Lines file of {"messages": [...]}')
    parser.add_argument("--features_dir", help="Where the target's states are kept")
    parser.add_argument("--json", required=True, help="JSON Lines file of results")
    parser.add_argument("--output_dir", help="Where drafts go, if they are to be kept")
    parser.add_argument("--settings", nargs="+", default=[])
    parser.add_argument("--drafts", nargs="+", default=[], help="Folders of drafts to measure")
    parser.add_argument("--tokens", type=int, default=300 * 1024, help="Of each training")
    parser.add_argument("--num_conversations", type=int, default=1200, help="How many the target reads")
    parser.add_argument("--num_held_out", type=int, default=64)
    parser.add_argument("--layer_ids", type=int, nargs="+", help="States of the target that drafts read, as in vLLM")
    parser.add_argument("--max_length", type=int, default=512, help="Tokens of a row")
    parser.add_argument("--dtype", default="auto", help="Dtype of the target")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if args.settings and args.features_dir is None:
        parser.error("--settings needs --features_dir")

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    target = target.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(args.target)
    conversations = load_dataset("json", data_files=args.dataset, split="train")
    split = len(conversations) - args.num_held_out
    if args.settings:
        read = conversations.select(range(min(args.num_conversations, split)))
        store = features(target, tokenizer, read, args.features_dir, args)
    held_out, path = None, Path(args.json)
    results = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    of_all = [sampled_digest(target), hashlib.sha256(Path(args.dataset).read_bytes()).hexdigest()]
    of_all += [args.num_conversations, args.num_held_out, args.max_length, args.dtype, args.bf16]
    of_all += [] if args.layer_ids is None else [args.layer_ids]
    print(
        "| setting | tokens | top 1 | top 4 | top 1, third | top 1, fifth | chain, T=0 | of four, T=0 | chain, T=1 |"
    )
    print("| --- " * 9 + "|")
    for name in (*args.drafts, *args.settings):
        is_draft = name in args.drafts
        draft = load_draft(name, dtype=torch.float32).to(target.device) if is_draft else None
        made_of = [*of_all, *([sampled_digest(draft)] if is_draft else [args.tokens, DEFAULTS | parse_setting(name)])]
        made_of = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
        result = next((each for each in results if each.get("made_of") == made_of), None)
        if result is None:
            if held_out is None:
                held_out = HeldOut(target, tokenizer, conversations.select(range(split, len(conversations))), args)
            if draft is None:
                draft = train(target, tokenizer, store, parse_setting(name), args)
            result = {"setting": name, "tokens": None if is_draft else args.tokens, "made_of": made_of}
            result |= held_out.measure(draft, args)
            if args.output_dir is not None and not is_draft:
                draft.to(target.dtype).save_pretrained(Path(args.output_dir) / str(len(results)))
            results.append(result)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
        print(line(result), flush=True)


if __name__ == "__main__":
    main()
