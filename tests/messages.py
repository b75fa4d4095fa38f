"""Messages of conversations, the rows of a folder of answers, and what of a row is learned."""

from datasets import load_dataset


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **others):
    return {"role": "assistant", "content": text, **others}


def read_answers(folder):
    return {row["row"]: row for row in load_dataset("json", data_files=str(folder / "*.jsonl"), split="train")}


def learned(tokenizer, encoded):
    """The texts of the tokens that are learned, one for each unbroken run of them."""
    runs, previous = [], -100
    for token, label in zip(encoded["input_ids"], encoded["labels"]):
        assert label in (-100, token)
        if label != -100:
            runs += [[]] if previous == -100 else []
            runs[-1].append(token)
        previous = label
    return [tokenizer.decode(run) for run in runs]
