"""`experiments/vocabulary_coverage.py`: the shares that it prints."""

import json
from collections import Counter

from transformers import AutoModelForCausalLM


def test_what_share_a_vocabulary_is(files, run_experiment, tokenizer):
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    command = ["--target", files / "target", "--dataset", files / "texts.jsonl", "--prompts", files / "prompts.jsonl"]
    sizes = ["--sizes", 8, target.config.vocab_size, "--max_new_tokens", 8]
    result = run_experiment("vocabulary_coverage.py", *command, *sizes)
    assert result.returncode == 0, result.stderr[-3000:]
    few, all_of_them = result.stdout.strip().splitlines()[-2:]
    texts = [json.loads(line)["text"] for line in (files / "texts.jsonl").read_text().splitlines()]
    counts = Counter(token for text in texts for token in tokenizer(text)["input_ids"])
    share = sum(number for _, number in counts.most_common(8)) / counts.total()
    shares = [column.strip() for column in few.split("|")[2:-1]]
    assert share < 1 and shares[0] == f"{share:.1%}" and all(float(each[:-1]) < 100 for each in shares)
    assert [column.strip() for column in all_of_them.split("|")[2:-1]] == ["100.0%"] * 3
