"""Messages of conversations, and the rows of a folder of answers."""

from datasets import load_dataset


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **others):
    return {"role": "assistant", "content": text, **others}


def read_answers(folder):
    return {row["row"]: row for row in load_dataset("json", data_files=str(folder / "*.jsonl"), split="train")}
