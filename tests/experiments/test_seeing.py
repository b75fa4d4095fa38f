"""`experiments/seeing.py`: pictures, the target's input, and the whole script on little data."""

import numpy as np
from conftest import load_script


def test_pictures_and_answers():
    seeing = load_script("experiments/seeing.py")
    processor, rows = seeing.make_processor(), seeing.make_rows(3, seed=0)
    digits = [turns[1]["content"] for turns in rows["messages"]]
    assert len(set(digits)) == 3 and digits[0].startswith("a ") and digits[0].count(",") == seeing.SIDE**2 - 1
    (first, second, _) = (np.asarray(images[0]) for images in rows["images"])
    assert first.shape == (seeing.SIDE * seeing.CELL, seeing.SIDE * seeing.CELL, 3) and (first != second).any()
    cells = [first[:, i : i + seeing.CELL] for i in range(0, first.shape[1], seeing.CELL)]
    assert all((cell < 128).any() for cell in cells)
    batch = seeing.encode(processor, rows[:])
    assert (batch["input_ids"] == processor.tokenizer.image_token_id).sum() == 3 * seeing.SIDE**2
    text = processor.tokenizer.decode(batch["input_ids"][0]).replace("<pad>", "")
    assert text.endswith(f"{seeing.QUESTION}>{digits[0]}</s>")
    asked = seeing.encode(processor, rows[:1], with_answers=False)["input_ids"]
    assert processor.tokenizer.decode(asked[0]).endswith(f"{seeing.QUESTION}>")


def test_the_script(tmp_path, run_experiment):
    sizes = ["--target_minutes", 0.02, "--draft_steps", 1, "--num_rows", 40, "--num_pictures", 1]
    result = run_experiment("seeing.py", "--output_dir", tmp_path / "seeing", *sizes)
    assert result.returncode == 0, result.stderr[-3000:]
    table = [line.split("|")[1:4] for line in result.stdout.splitlines() if line.startswith("|")][2:]
    assert [(name.strip(), float(temperature)) for name, temperature, _ in table] == [
        ("pictures", 0.0),
        ("pictures", 1.0),
        ("texts alone", 0.0),
        ("texts alone", 1.0),
        ("pictures and features", 0.0),
        ("pictures and features", 1.0),
    ]
    assert all(float(length) >= 1 for *_, length in table)
    assert (tmp_path / "seeing" / "pictures" / "model.safetensors").exists()
