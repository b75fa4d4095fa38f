"""Trainings that are killed, and whose newest checkpoint may lose a part besides: they end with the same weights."""

import functools
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from conftest import make_target, make_tokenizer
from safetensors.torch import load_file


# Importing what training needs takes much longer than these trainings: they are forked from a process that has it.
processes = multiprocessing.get_context("fork")
MAX_STEPS = 8


def train(folder: Path, resume: bool, save_total_limit: int | None) -> None:
    """In a process of its own: trains to the end, and leaves the draft in `final`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datasets import Dataset

    from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments

    arguments = Eagle3TrainingArguments(
        str(folder),
        max_steps=MAX_STEPS,
        save_steps=2,
        save_total_limit=save_total_limit,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = Eagle3Trainer(
        model=None,
        target_model=make_target("llama"),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": [f"the {i} of {i * 7}, and so on" for i in range(16)]}),
        processing_class=make_tokenizer(),
    )
    if resume:
        try:
            trainer.train(resume_from_checkpoint=True)
        except ValueError as error:
            if "no checkpoint to resume from" not in str(error) and "finished training" not in str(error):
                raise
            if "no checkpoint" in str(error):
                trainer.train()
            else:  # killed while it saved the draft itself
                trainer.model = type(trainer.draft).from_pretrained(folder / f"checkpoint-{MAX_STEPS}")
    else:
        trainer.train()
    trainer.save_model(str(folder / "final"))
    (folder / "done").touch()


def start(*args):
    process = processes.Process(target=train, args=args)
    process.start()
    return process


@functools.cache
def uninterrupted() -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a training that nobody kills, and how long it takes."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        process = start(Path(folder), False, None)
        process.join()
        assert (Path(folder) / "done").exists()
        return load_file(Path(folder) / "final" / "model.safetensors"), time.monotonic() - begin


def damage(rng, folder: Path) -> str:
    """A file of the newest checkpoint that a full disk or a crash of the machine has spoiled."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    files = [file for file in checkpoints[-1].rglob("*") if file.suffix in (".json", ".pt", ".pth", ".safetensors")]
    file = rng.choice(sorted(files)) if checkpoints and files else None
    if file is None:
        return ""
    way = rng.choice(["cut", "empty", "remove", "zeros"])
    content = file.read_bytes()
    place = rng.randrange(max(len(content), 1))
    if way == "remove":
        file.unlink()
    else:
        file.write_bytes(
            {"cut": content[:place], "empty": b"", "zeros": content[:place] + bytes(len(content) - place)}[way]
        )
    return f", {way} {file.relative_to(folder)}"


def run(rng, scratch: Path) -> tuple[int, str | None]:
    expected, seconds = uninterrupted()
    folder, limit, what = scratch / "run", rng.choice([None, 2, 3]), ""
    kills = rng.randint(1, 3)
    for number in range(kills):
        delay = rng.uniform(0.2, 1.1) * seconds
        process = start(folder, number > 0, limit)
        process.join(delay)
        process.kill()
        process.join()
        if process.exitcode not in (0, -9):
            return number + 1, f"ended with {process.exitcode} (limit {limit}{what})"
        shutil.rmtree(folder / "final", ignore_errors=True)
        (folder / "done").unlink(missing_ok=True)
        what += f", killed after {delay:.1f} s"
        if rng.random() < 0.5 and list(folder.glob("checkpoint-*")):
            what += damage(rng, folder)
    process = start(folder, True, limit)
    process.join(60 + 10 * seconds)
    if process.exitcode != 0 or not (folder / "done").exists():
        process.kill()
        return kills, f"could not go on: {process.exitcode} (limit {limit}{what})"
    actual = load_file(folder / "final" / "model.safetensors")
    differing = [
        name for name in expected if not torch.allclose(expected[name].float(), actual[name].float(), atol=1e-5)
    ]
    return kills, f"ends with other weights: {differing} (limit {limit}{what})" if differing else None
