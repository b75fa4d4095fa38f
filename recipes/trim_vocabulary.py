# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Removes rare tokens from a draft's vocabulary, without training. The draft's head gets smaller, so drafting gets faster. The draft
can no longer propose the removed tokens, so the target accepts a little less. Texts stay the same.

    python recipes/trim_vocabulary.py outputs/my-draft --dataset_name outputs/answers --draft_vocab_size 16384 --output_dir outputs/my-draft-16k

The most frequent tokens of the data stay. In conversations only the assistant's tokens count. The target's own texts are best. The data
may be a Hub id, a folder of JSON Lines files, or a file (JSON, Parquet, text), as for `recipes/train.py`.

A record of the draft's training (`training.json`) is copied for the new draft's card, without the results of its evaluation.
"""

from importlib.util import find_spec
from pathlib import Path


if find_spec("trl") is None:
    raise SystemExit("This script needs more packages: pip install 'hf-eagle3[train]'")

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints.files import check_new_folder
from hf_eagle3.data import (
    RowEncoder,
    check_chat_template,
    count_tokens,
    coverage,
    encode_rows,
    kind_of_data,
    load_data,
    most_frequent_tokens,
    plain_rows,
    rows_of,
)
from hf_eagle3.hub.push import records_of, write_records
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest
from hf_eagle3.scripts import (
    ScriptParser,
    add_place_of_draft,
    add_trust_remote_code,
    folder_or_hub_id,
    place_of_draft,
    run_script,
)
from hf_eagle3.tokenizer import load_tokenizer, read_template


def write_record(record: dict, folder: Path, draft: Eagle3ForSpeculation, size: int) -> None:
    """Writes the record of the training for the trimmed draft. Its command gets a line for what this script did."""
    command = (
        f"python recipes/trim_vocabulary.py DRAFT --dataset_name DATA --draft_vocab_size {size} --output_dir TRIMMED"
    )
    command = "\n".join(filter(None, (record["command"], command)))
    record = record | {"draft_weights": weights_digest(draft.state_dict()), "evaluation": None, "command": command}
    write_records(folder, record, None)


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("draft", type=folder_or_hub_id, help="Folder or Hub id")
    add_place_of_draft(parser)
    parser.add_argument("--dataset_name", required=True, help="Texts or conversations to count tokens in")
    parser.add_argument("--dataset_config", help="Which configuration of a data set on the Hub")
    parser.add_argument("--dataset_train_split", default="train", help="The split to read, or a part: train[:1000]")
    parser.add_argument("--draft_vocab_size", type=int, required=True, help="How many tokens stay")
    parser.add_argument(
        "--target", type=folder_or_hub_id, help="The tokenizer's folder or Hub id. By default the draft's target"
    )
    add_trust_remote_code(parser)
    parser.add_argument(
        "--chat_template_path", help="Jinja file that replaces the chat template of the target's tokenizer"
    )
    parser.add_argument("--output_dir", required=True, help="A new folder")
    args = parser.parse_args()
    check_new_folder(args.output_dir)
    draft = Eagle3ForSpeculation.from_pretrained(args.draft, **place_of_draft(args))
    record, _ = records_of(draft, None, None)  # those of other weights are left out, with a warning
    size = draft.config.draft_vocab_size
    if not 0 < args.draft_vocab_size < size:
        raise ValueError(
            f"--draft_vocab_size is {args.draft_vocab_size}, but must be from 1 to {size - 1}: the draft has {size} tokens."
        )
    name = args.target or (draft.config.speculators_config or {}).get("verifier", {}).get("name_or_path")
    if not name:
        raise ValueError("The draft does not name its target, whose tokenizer is needed. Pass --target.")
    if draft.get_output_embeddings().out_features == 0:
        place = "".join(f" --draft_{key} {value}" for key, value in place_of_draft(args).items())
        raise ValueError(
            f"{args.draft} stores no head and uses its target's. Give it one, and trim the result: "
            f"python recipes/export.py {args.draft}{place} --to speculators --target {name} --output_dir NEW_FOLDER"
        )
    tokenizer = load_tokenizer(name, trust_remote_code=args.trust_remote_code)
    if args.chat_template_path is not None:
        tokenizer.chat_template = read_template(args.chat_template_path)
    split = args.dataset_train_split
    dataset = plain_rows(rows_of(load_data(args.dataset_name, args.dataset_config, split), split), "train")
    kind = kind_of_data(dataset, "text", "train")
    is_chat = kind in ("messages", "conversations")
    if is_chat:
        check_chat_template(tokenizer)
    encoder = RowEncoder(tokenizer, kind, draft.config.vocab_size, is_chat, features=dataset.features)
    counts = count_tokens(encode_rows(dataset, encoder, "train"), draft.config.vocab_size)
    known = draft.draft_token_ids.cpu().numpy()
    kept = known[most_frequent_tokens(counts[known], args.draft_vocab_size)]
    draft.trim_draft_vocabulary(kept.tolist())
    draft.save_pretrained(args.output_dir)
    if record is not None:
        write_record(record, Path(args.output_dir), draft, args.draft_vocab_size)
    shares = (coverage(counts, each) for each in (kept, known))
    after, before = ("all" if share == 1 else f"{min(share, 0.9999):.2%}" for share in shares)  # not a rounded 100.00%
    print(
        f"Wrote {args.output_dir}: {len(kept)} of {size} tokens, which make up {after} of the {counts.sum()} tokens that count "
        f"({before} before). Measure both drafts by recipes/benchmark.py."
    )


if __name__ == "__main__":
    run_script(main)
