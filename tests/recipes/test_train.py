"""`recipes/train.py` as users call it: other processes, arguments, files."""

import io
import json
import random
import re
import runpy
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from conftest import RECIPES, assert_same_text, load_script, make_prompt, make_target, run_in_two_processes
from datasets import Dataset, DatasetDict
from filelock import FileLock
from forked import run_forked
from huggingface_hub import ModelCard
from messages import assistant, user
from peft import LoraConfig, PeftModel, get_peft_model
from seeing import gemma3, make, make_image, make_processor
from transformers import AutoModel, AutoModelForCausalLM, PrinterCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from trl import DatasetMixtureConfig, ScriptArguments, TrlParser

from hf_eagle3 import Eagle3ForSpeculation, Eagle3TrainingArguments
from hf_eagle3.hub import write_draft
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest
from hf_eagle3.training.parser import Eagle3Parser


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer):
    """A target, chats and texts."""
    folder, generator = tmp_path_factory.mktemp("train"), random.Random(0)
    target = make_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    def words():
        return "".join(generator.choice("abcdef ") for _ in range(generator.randint(10, 40)))

    chats = [{"messages": [user(words()), assistant(words())]} for _ in range(48)]
    (folder / "chats").mkdir()
    for name, rows in (("train", chats), ("test", chats[:6])):
        (folder / "chats" / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in rows))
    return folder


def arguments_of(files, output_dir, data="chats", max_steps=4):
    arguments = {"model_name_or_path": files / "target", "dataset_name": files / data, "output_dir": output_dir}
    arguments |= {"max_steps": max_steps, "save_steps": 2, "max_length": 64, "logging_steps": 1}
    arguments |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return [part for name, value in arguments.items() for part in (f"--{name}", value)]


def train_in_two(kind, files, folder, *arguments):
    arguments = *arguments_of(files, folder / "out"), *map(str, arguments)
    return run_in_two_processes(kind, folder, RECIPES / "train.py", *arguments)


def losses(result, name="loss_per_step"):
    assert result.returncode == 0, result.stderr[-3000:]
    return [float(value) for value in re.findall(rf"'{name}': '?([\d.]+)", result.stdout)]


FRESH = ("--assistant_only_loss", "--draft_vocab_size", 32)
EVALUATES = ("--eval_strategy", "steps", "--eval_steps", 4, "--num_eval_prompts", 2, "--eval_max_new_tokens", 8)


def interrupt(*args, **kwargs):
    """What Ctrl-C does. (A signal would not, where it is ignored, as in processes of the background.)"""
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def evaluated_run(files):
    arguments = (*arguments_of(files, files / "whole"), *FRESH, *EVALUATES, "--per_device_train_batch_size", 4)
    return run_forked(RECIPES / "train.py", *arguments)


@pytest.fixture(scope="module")
def whole_run(evaluated_run):
    return losses(evaluated_run)


@pytest.fixture(scope="module")
def script():
    return load_script("recipes/train.py")


def test_one_process_spreads_a_target(files, script, monkeypatch):
    monkeypatch.setattr(script, "PartialState", lambda: SimpleNamespace(num_processes=2, device="cpu"))
    for device_map in ("auto", "balanced"):
        config = script.TargetConfig(str(files / "target"), device_map=device_map)
        with pytest.raises(ValueError, match="each of the 2 processes would load one. Start one process"):
            script.load_configured_target(config)
    config = script.TargetConfig(str(files / "target"), device_map="cpu")
    assert script.load_configured_target(config, with_layers=False).device.type == "cpu"


def test_the_draft_that_comes_out(files, evaluated_run, whole_run):
    # Whoever trains sees what the draft will never propose.
    told = r"Draft vocabulary: 32 of \d+ tokens, which make up all of the [\d,]+ super"
    assert re.search(told, evaluated_run.stderr)
    # The unroll grows: that is no reason for the loss to rise.
    assert losses(evaluated_run, "ttt_steps") == [1, 2, 4, 6] and whole_run[-1] < whole_run[0]
    assert "recipes/benchmark.py --target" in evaluated_run.stdout and "acceptance_rate" not in evaluated_run.stdout
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    draft = Eagle3ForSpeculation.from_pretrained(files / "whole")
    assert draft.config.draft_vocab_size == 32
    assert_same_text(target, draft, make_prompt(9))


KILLED = """
import os, random, runpy, signal, sys, threading
from transformers import PrinterCallback

def on_log(self, args, state, control, **kwargs):
    if state.global_step == {step}:  # whose checkpoint may be written by then, or half of it, or not at all
        threading.Timer(random.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGKILL)).start()

PrinterCallback.on_log = on_log
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + "/train.py", run_name="__main__")
"""


def test_a_killed_run_goes_on_to_the_same_losses(files, whole_run, tmp_path):
    """Killed after a step that is drawn at random, with a checkpoint at each."""
    settings = (*FRESH, "--per_device_train_batch_size", 4, "--save_steps", 1)
    last_step = random.randint(2, 3)  # so that there is a whole checkpoint
    command = [RECIPES / "train.py", *arguments_of(files, tmp_path / "killed"), *settings]
    (tmp_path / "killed.py").write_text(KILLED.format(step=last_step, folder=str(RECIPES)))
    result = run_forked(tmp_path / "killed.py", *command[1:])
    assert result.returncode == signal.SIGKILL and not (tmp_path / "killed" / "model.safetensors").exists()
    resumed = losses(run_forked(*command, "--resume_from_checkpoint", "true"))
    assert 4 - last_step <= len(resumed) < 4, last_step
    assert resumed == whole_run[-len(resumed) :], last_step
    ours = Eagle3ForSpeculation.from_pretrained(tmp_path / "killed").state_dict()
    theirs = Eagle3ForSpeculation.from_pretrained(files / "whole").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_interrupted_run_says_how_to_go_on(files, tmp_path, monkeypatch, run_recipe):
    arguments = [*arguments_of(files, tmp_path / "out", max_steps=3), *FRESH]
    monkeypatch.setattr(PrinterCallback, "on_log", interrupt)
    result = run_recipe("train.py", *arguments)
    assert result.returncode == 1 and "from the beginning: there is no checkpoint yet" in result.stderr
    monkeypatch.undo()
    monkeypatch.setattr(PrinterCallback, "on_save", interrupt, raising=False)
    result = run_recipe("train.py", *arguments)
    assert result.returncode == 1 and "Interrupted. To continue after checkpoint-2:" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.undo()
    command = shlex.split(result.stderr.strip().splitlines()[-1])
    assert command[:2] == ["python", str(RECIPES / "train.py")]
    assert len(losses(run_recipe("train.py", *command[2:]))) == 1


@pytest.mark.parametrize(
    ("num_processes", "is_fsdp", "launcher"),
    [
        (1, False, "python"),
        (4, False, "accelerate launch --num_processes 4"),
        (4, True, "accelerate launch --config_file ACCELERATE.yaml --num_processes 4"),
    ],
)
def test_the_command_that_continues_a_run(script, monkeypatch, num_processes, is_fsdp, launcher):
    args = SimpleNamespace(world_size=num_processes)
    trainer = SimpleNamespace(args=args, is_fsdp_enabled=is_fsdp, is_deepspeed_enabled=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--max_steps", "3"])
    assert script.resume_command(trainer, None) == f"{launcher} train.py --max_steps 3"
    resumed = f"{launcher} train.py --max_steps 3 --resume_from_checkpoint true"
    assert script.resume_command(trainer, "out/checkpoint-2") == resumed
    monkeypatch.setattr(sys, "argv", ["train.py", "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert script.resume_command(trainer, "out/checkpoint-2") == resumed
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume_from_checkpoint", "out/checkpoint-1", "--max_steps", "3"])
    assert script.resume_command(trainer, "out/checkpoint-2").endswith(
        "-1 --max_steps 3 --resume_from_checkpoint true"
    )


def test_a_terminated_run_does_not_look_finished(files, tmp_path, monkeypatch, run_recipe):
    """`enable_jit_checkpoint` saves on SIGTERM, and ends training without an error."""
    begin = JITCheckpointCallback.on_step_begin

    def terminated(self, args, state, control, **kwargs):
        self.jit_manager.is_checkpoint_requested = state.global_step == 2
        begin(self, args, state, control, **kwargs)

    monkeypatch.setattr(JITCheckpointCallback, "on_step_begin", terminated)
    arguments = [*arguments_of(files, tmp_path / "out"), *FRESH, "--enable_jit_checkpoint", "--resume_from_checkpoint"]
    result = run_recipe("train.py", *arguments, "auto")
    assert result.returncode == 1 and "Interrupted. To continue after checkpoint-2:" in result.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()
    monkeypatch.undo()
    assert len(losses(run_recipe("train.py", *arguments, "auto"))) == 2


def test_accelerate_launches_it(capfd):
    """The launcher and a process of its own. Elsewhere processes with its environment are forked, which is quicker."""
    command = ["--cpu", "--num_processes", 1, RECIPES / "train.py", "--help"]
    launch_command(launch_command_parser().parse_args(list(map(str, command))))
    assert "usage: train.py" in capfd.readouterr().out


@pytest.mark.parametrize("kind", ["ddp, tensor-parallel target", "fsdp2, target by FSDP2"])
def test_two_processes_give_the_losses_of_one(files, evaluated_run, whole_run, kind, tmp_path):
    target = {"ddp, tensor-parallel target": ("--tp_plan", "auto"), "fsdp2, target by FSDP2": ("--fsdp_size", 2)}
    settings = (*FRESH, *EVALUATES, "--per_device_train_batch_size", 2, *target[kind])
    result = train_in_two(kind.partition(",")[0], files, tmp_path, *settings)
    # Muon orthogonalizes in bfloat16, which turns a rounding difference into one of a few thousandths.
    assert losses(result) == pytest.approx(whole_run, rel=2e-3)
    for name in ("eval_loss_per_step", "eval_acceptance_length"):
        (ours,), (theirs,) = losses(result, name), losses(evaluated_run, name)
        assert ours == pytest.approx(theirs, rel=0.05), name
    ours = Eagle3ForSpeculation.from_pretrained(tmp_path / "out").state_dict()
    theirs = Eagle3ForSpeculation.from_pretrained(files / "whole").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), atol=5e-3) for name in ours)
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["draft_weights"] == weights_digest(ours) and record["num_processes"] == 2
    # The code beside the weights is the draft's, not that of the class which FSDP makes of it.
    names = {path.name for path in (tmp_path / "out").glob("*.py")}
    assert names == {path.name for path in (files / "whole").glob("*.py")} and "modeling_eagle3.py" in names
    if kind.startswith("fsdp2"):  # whose optimizer is saved by parts
        checkpoint = ("--resume_from_checkpoint", tmp_path / "out" / "checkpoint-2")
        assert losses(train_in_two("fsdp2", files, tmp_path, *settings, *checkpoint)) == losses(result)[2:]


def test_parts_of_a_stream_with_different_lengths(files, tmp_path):
    """
    Processes end their passes at the same step, or one would begin the next alone, and wait forever. They evaluate as many
    batches.
    """
    lines = (files / "chats" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "parts").mkdir()
    # Four files for two processes: older accelerate divides rows, not files, if there are as many files as processes.
    parts = {"train-0": lines[:7], "train-1": lines[7:14], "train-2": lines[14:18], "train-3": lines[18:21]}
    parts |= {"test-0": lines[:6], "test-1": lines[6:7]}
    for name, part in parts.items():
        (tmp_path / "parts" / f"{name}.jsonl").write_text("".join(part))
    settings = ("--dataset_name", tmp_path / "parts", "--dataset_streaming", "--max_steps", 9)
    settings += ("--eval_strategy", "steps", "--eval_steps", 9, "--num_eval_prompts", 1, "--eval_max_new_tokens", 4)
    batches = ("--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 1)
    result = train_in_two("ddp", files, tmp_path, *FRESH, *settings, *batches)
    *epochs, _, _ = losses(result, "epoch")  # of the steps, of the evaluation, and at the end
    assert epochs == pytest.approx([step / 9 for step in (1, 2, 3, 4, 10, 11, 12, 13, 19)], rel=1e-2)
    assert len(losses(result, "eval_loss_per_step")) == 1


def test_arguments_of_a_file_and_an_adapter(files, whole_run, tmp_path, run_recipe):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"draft_name_or_path: {files / 'whole'}\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"
        "per_device_train_batch_size: 2\nlearning_rate: 0.5\n"
    )
    options = ("--config", config, "--learning_rate", 0.01, "--assistant_only_loss", "--ttt_steps", 2)
    result = run_recipe("train.py", *arguments_of(files, tmp_path / "adapter", max_steps=2), *options)
    assert len(losses(result)) == 2 and "'learning_rate': '0.01'" in result.stdout
    commands = result.stdout[result.stdout.index("To merge it:") :].split("Then, to use it:")[0].splitlines()[1:]
    names = {"PeftModel": PeftModel, "Eagle3ForSpeculation": Eagle3ForSpeculation}
    exec("\n".join(line.strip() for line in commands), names)
    merged = Eagle3ForSpeculation.from_pretrained(tmp_path / "adapter-merged")
    assert f"push.py {tmp_path / 'adapter-merged'}" in result.stdout
    draft = Eagle3ForSpeculation.from_pretrained(files / "whole")
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    adapter = PeftModel.from_pretrained(draft, tmp_path / "adapter").eval()
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    assert_same_text(target, adapter, make_prompt(9))
    loaded = AutoModel.from_pretrained(tmp_path / "adapter", trust_remote_code=True)  # by transformers' own means
    assert loaded._hf_peft_config_loaded
    with pytest.raises(ValueError, match="an adapter beside its weights"):
        write_draft(loaded, tmp_path / "pushed", "me/draft")
    adapted = adapter.merge_and_unload()
    for name, weight in adapted.state_dict().items():
        assert torch.equal(weight, merged.state_dict()[name]), name
    changed = {name for name, weight in adapted.state_dict().items() if not torch.equal(weight, before[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.base_model is None and "A LoRA adapter for whole" in card.text  # a folder of this machine
    assert "PeftModel.from_pretrained(draft" in card.text and str(files) not in card.text
    assert "lora" not in card.data.tags and "learning_rate: 0.01" in card.text


def test_a_draft_in_a_folder_of_its_repo(files, whole_run, tmp_path, run_recipe, monkeypatch):
    def trainer(model, **others):
        raise ValueError(f"with {model.loaded_with} and {model.config.draft_vocab_size} tokens")

    monkeypatch.setattr("hf_eagle3.Eagle3Trainer", trainer)
    place = ("--draft_name_or_path", files, "--draft_subfolder", "whole", "--draft_revision", "main")
    result = run_recipe("train.py", *arguments_of(files, tmp_path / "out"), *place)
    assert "with {'revision': 'main', 'subfolder': 'whole'} and 32 tokens" in result.stderr


def test_checkpoints_are_not_overwritten(files, whole_run, run_recipe):
    weights = (files / "whole" / "model.safetensors").read_bytes()
    result = run_recipe("train.py", *arguments_of(files, files / "whole"), *FRESH)
    assert result.returncode == 1 and "has checkpoints of another run" in result.stderr
    # What a resumed training refuses needs no traceback, either.
    resumed = ("--resume_from_checkpoint", "true", "--max_length", 32)
    result = run_recipe("train.py", *arguments_of(files, files / "whole", max_steps=6), *FRESH, *resumed)
    assert result.returncode == 1 and "was trained with other settings: max_length" in result.stderr
    assert (files / "whole" / "model.safetensors").read_bytes() == weights


def test_what_a_training_refuses_needs_no_traceback(files, tmp_path, run_recipe):
    arguments = arguments_of(files, tmp_path / "out")
    lock = tmp_path / "out" / ".cache" / "huggingface" / "training.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        result = run_recipe("train.py", *arguments)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "\nValueError: Another run writes to" in f"\n{result.stderr}"
    few = ("--dataset_streaming", "true", "--gradient_accumulation_steps", 99)
    result = run_recipe("train.py", *arguments, *few)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "\nValueError: The train data ended before the first step" in f"\n{result.stderr}"


def test_data_of_several_forms(files, tmp_path, run_recipe):
    rows = Dataset.from_list([{"text": "what is up"}] * 20)
    arguments = arguments_of(files, tmp_path / "out", max_steps=1)
    name = arguments.index("--dataset_name") + 1
    arguments[name] = tmp_path / "numbers.jsonl"
    arguments[name].write_text('{"text": 5}\n')
    result = run_recipe("train.py", *arguments)
    assert result.returncode == 1 and "\nValueError: 1 of 1 rows" in f"\n{result.stderr}"
    assert "Row 0: 'text' is 5, but must be a text" in result.stderr and not list(tmp_path.glob("out/*.safetensors"))
    for number, saved in enumerate((rows, DatasetDict(train=rows))):
        saved.save_to_disk(tmp_path / f"saved-{number}")
        arguments[name] = tmp_path / f"saved-{number}"
        run_recipe("train.py", *arguments, "--output_dir", tmp_path / f"out-{number}")
        assert json.loads((tmp_path / f"out-{number}" / "training.json").read_text())["rows"] == 20


def test_a_split_that_is_not_there(files, tmp_path, run_recipe):
    arguments = arguments_of(files, tmp_path / "out", max_steps=1)
    result = run_recipe("train.py", *arguments, "--eval_strategy", "steps", "--dataset_test_split", "held_out")
    assert result.returncode == 1 and "There is no split 'held_out'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_mixture(files, tmp_path, run_recipe):
    data = [{"path": "json", "data_files": str(files / "chats" / f"{name}.jsonl")} for name in ("train", "test")]
    config = {"datasets": [{**each, "split": f"train[:{number}]"} for each, number in zip(data, (5, 3))]}
    (tmp_path / "mixture.yaml").write_text(json.dumps(config))
    arguments = arguments_of(files, tmp_path / "out", max_steps=1)
    result = run_recipe("train.py", *arguments, f"--config={tmp_path / 'mixture.yaml'}")
    assert result.returncode == 1 and "both say what to learn from" in result.stderr
    position = arguments.index("--dataset_name")
    del arguments[position : position + 2]
    result = run_recipe("train.py", *arguments, f"--config={tmp_path / 'mixture.yaml'}")
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["rows"] == 8 and record["datasets"] == ["train.jsonl", "test.jsonl"]
    assert [each["split"] for each in record["arguments"]["datasets"]] == ["train[:5]", "train[:3]"]
    assert "dataset_name" not in record["arguments"]


def test_options_of_mixtures_for_one_data_set(script, monkeypatch):
    monkeypatch.setattr(script, "load_data", lambda *args: args)
    arguments = script.TrainScriptArguments(dataset_name="me/data")
    with pytest.raises(ValueError, match=r"`test_split_size` is for mixtures .* --dataset_test_split 'train\[:200\]'"):
        script.load_configured_data(arguments, DatasetMixtureConfig(test_split_size=0.1))
    loaded = script.load_configured_data(arguments, DatasetMixtureConfig(streaming=True))
    assert loaded == ("me/data", None, "train", True)


def test_a_mistyped_path(files, tmp_path, run_recipe):
    arguments = arguments_of(files, tmp_path / "out", max_steps=1)
    arguments[arguments.index("--model_name_or_path") + 1] = path = tmp_path / "targt"
    result = run_recipe("train.py", *arguments)
    assert result.returncode == 1 and f"there is no folder {path}" in result.stderr


def test_the_chat_of_the_docs(files, tmp_path, tokenizer, monkeypatch, run_recipe):
    """As docs/training.md has it: messages, template and YAML."""
    text = (RECIPES.parent / "docs" / "training.md").read_text()
    text = text[text.index("## A chat, from beginning to end") :]
    chat, template, config = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("json", "jinja", "yaml"))
    monkeypatch.chdir(tmp_path)
    Path("chats").mkdir()
    for split in ("train", "test"):
        Path("chats", f"{split}.jsonl").write_text(chat * 8)
    Path("chat.jinja").write_text(template)
    Path("chat.yaml").write_text(config)
    # As on the page, the target has no template of its own. (The draft vocabulary is small, as the chats are.)
    shutil.copytree(files / "target", "path/to/target", ignore=shutil.ignore_patterns("*.jinja"))
    target = ("--draft_vocab_size", 16)
    shared = ("--max_steps", 1, "--report_to", "none", "--use_cpu", "true", "--eval_max_new_tokens", 4)
    result = run_recipe("train.py", "--config", "chat.yaml", "--chat_template_path", "chat.jinja", *target, *shared)
    assert "Saved the draft to outputs/my-target-speculator.eagle3" in result.stdout
    # To measure as it was trained, on its own prompts.
    held_out = str(Path("chats", "test.jsonl"))
    assert f"-results.jsonl --tasks {held_out} --chat_template_path chat.jinja" in result.stdout
    assert Path("outputs/my-target-speculator.eagle3", "model.safetensors").exists()
    # Who has the card has no template either.
    card = ModelCard.load("outputs/my-target-speculator.eagle3/README.md").text
    exec(re.search(r"```python\n(.*?)```", card, re.S)[1].replace('"my-target', '"outputs/my-target'), {})


@pytest.mark.parametrize("offline", [False, True])
def test_what_to_measure_on(tmp_path, script, monkeypatch, offline):
    """Prompts that the data holds out, or tasks of the Hub if it can be reached."""
    monkeypatch.setattr(script, "is_offline_mode", lambda: offline)
    chats, texts = (SimpleNamespace(processing_class=SimpleNamespace(chat_template=each)) for each in ("x", None))
    own, of_the_hub = [str(tmp_path / "test.jsonl")], [] if offline else ["paper"]
    pair = {"prompt": "a", "completion": "b"}
    for row, expected in (({"messages": []}, own), (pair, own), ({"text": "a"}, of_the_hub)):
        (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
        assert script.tasks_to_measure(chats, str(tmp_path)) == expected
    for name in ("me/data", None):
        assert script.tasks_to_measure(chats, name) == of_the_hub and script.tasks_to_measure(texts, name) == []


def test_commands_for_what_was_trained(files, script):
    """They load the target as training did, and push to the repo of the training."""
    args = SimpleNamespace(chat_template_path=None, trust_remote_code=True, push_to_hub=True)
    trainer = SimpleNamespace(args=args, hub_model_id="me/draft")
    config = script.TargetConfig("me/target", load_in_4bit=True, dtype="bfloat16")
    command = script.measure_command(trainer, config, "me/draft", "results.jsonl", ["paper"])
    assert command[2:8] == ["--target", "me/target", "--draft", "me/draft", "--json", "results.jsonl"]
    assert command[8:] == ["--tasks", "paper", "--load_in_4bit", "--dtype", "bfloat16", "--trust_remote_code"]
    command = script.push_command(trainer, config, Path("out"), "results.jsonl")
    assert command[2:] == ["out", "--benchmark", "results.jsonl", "--repo_id", "me/draft"]

    # Nobody else has the folder of a target. The repo of an adapter takes no whole draft.
    args.trust_remote_code = False
    config = script.TargetConfig(str(files / "target"), use_peft=True)
    assert "--dtype" not in script.measure_command(trainer, config, "out", "results.jsonl", [])
    command = script.push_command(trainer, config, Path("out-merged"), "results.jsonl")
    assert command[2:] == ["out-merged", "--benchmark", "results.jsonl", "--target", "OWNER/NAME"]


@pytest.mark.parametrize("where", ["flag", "YAML"])
def test_misspelled_arguments(tmp_path, run_recipe, where):
    (tmp_path / "config.yaml").write_text("tt_steps: 3\n")
    arguments = ("--tt_steps", 3) if where == "flag" else ("--config", tmp_path / "config.yaml")
    result = run_recipe("train.py", *arguments)
    assert result.returncode == 2 and "--tt_steps (did you mean --ttt_steps?)" in result.stderr
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("content", [None, "a: [", "\ttt_steps: 3"])
def test_a_config_that_cannot_be_read(tmp_path, run_recipe, content):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    for script in ("train.py", "regenerate.py"):
        result = run_recipe(script, "--config", path)
        assert result.returncode == 2
        assert result.stderr.startswith(f"{script}: error: {path} cannot be read (`--config`): ")


@pytest.mark.parametrize(
    ("content", "message"),
    [("datasets: [{path: a, foo: 1}]", "unexpected keyword argument 'foo'"), ("output_dir: 2024", "not int")],
)
def test_a_config_with_values_of_another_type(tmp_path, run_recipe, content, message):
    (tmp_path / "config.yaml").write_text(content)
    result = run_recipe("train.py", "--config", tmp_path / "config.yaml", "--use_cpu")
    assert result.returncode == 2 and result.stderr.startswith("train.py: error: ") and message in result.stderr


@pytest.fixture
def parsed(tmp_path):
    """`parsed(text)` returns the training arguments of a YAML file."""

    def parse(text):
        (tmp_path / "config.yaml").write_text(text)
        parser = Eagle3Parser((Eagle3TrainingArguments,))
        return parser.parse_args_and_config(["--config", str(tmp_path / "config.yaml")])[0]

    return parse


def test_strategies_of_a_file(parsed):
    """YAML reads `no` as false."""
    names = ("eval_strategy", "save_strategy", "logging_strategy")
    arguments = parsed("output_dir: out\nbf16: no\nuse_cpu: yes\n" + "".join(f"{name}: no\n" for name in names))
    assert [getattr(arguments, name) for name in names] == ["no"] * 3
    assert arguments.bf16 is False and arguments.use_cpu is True


def test_flags_alone():
    """Those whose default is `None`, too."""
    flags = ("bf16", "gradient_checkpointing", "completion_only_loss", "packing")
    arguments = Eagle3Parser((Eagle3TrainingArguments,)).parse_args([f"--{flag}" for flag in flags])
    assert all(getattr(arguments, flag) is True for flag in flags)


def test_help_in_a_code_page(monkeypatch):
    """Windows writes to files and pipes in one."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252", write_through=True))
    monkeypatch.syspath_prepend(RECIPES)
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(RECIPES / "train.py"), run_name="__main__")
    assert b"--model_name_or_path" in printed.getvalue()


def test_help_on_python_3_14(monkeypatch):
    """Its classes keep their annotations elsewhere."""

    @dataclass
    class Arguments(ScriptArguments):
        own: int = 0

    def as_there(parser, *args, init=TrlParser.__init__, **kwargs):
        init(parser, *args, **kwargs)
        del Arguments.__annotations__

    monkeypatch.setattr(TrlParser, "__init__", as_there)
    assert "\nArguments:\n  --own" in Eagle3Parser((Arguments,)).format_help()


def test_numbers_of_a_file(parsed, monkeypatch):
    """
    YAML reads `1e-5` as a text. The parser mends only flags, not what is in dictionaries. TRL reads the file in the encoding of the
    system, which is a code page on Windows.
    """
    monkeypatch.setattr("trl.scripts.utils.open", partial(open, encoding="cp1252"), raising=False)
    arguments = parsed(
        "output_dir: out\neos_token: <｜end▁of▁sentence｜>\nuse_cpu: true\nbf16: false\nlearning_rate: 1e-4\nmodel_init_kwargs: {rms_norm_eps: 1e-6, name: e5}\n"
        "lr_scheduler_kwargs:\n  min_lr: 1E-5\n  list: [-2.5e+3]\n"
    )
    assert arguments.learning_rate == 1e-4 and arguments.eos_token == "<｜end▁of▁sentence｜>"
    assert arguments.model_init_kwargs == {"rms_norm_eps": 1e-6, "name": "e5"}
    assert arguments.lr_scheduler_kwargs == {"min_lr": 1e-5, "list": [-2500.0]}


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_the_home_folder(tmp_path, monkeypatch, form):
    """A shell expands it only where it begins an argument."""
    monkeypatch.setenv("HOME", str(tmp_path))
    content = "output_dir: ~/out\nmodel_init_kwargs: {paths: [~/a], text: a~/b}\nuse_cpu: true\nbf16: false\n"
    (tmp_path / "config.yaml").write_text(content)
    (arguments,) = Eagle3Parser((Eagle3TrainingArguments,)).parse_args_and_config(
        [*(part.format("~/config.yaml") for part in form), "--chat_template_path=~/chat.jinja"]
    )
    assert arguments.output_dir == f"{tmp_path}/out" and arguments.chat_template_path == f"{tmp_path}/chat.jinja"
    assert arguments.model_init_kwargs == {"paths": [f"{tmp_path}/a"], "text": "a~/b"}


def test_help(run_recipe):
    help_ = run_recipe("train.py", "--help").stdout
    # Not a usage of 165 lines, which argparse would also print before each error.
    assert help_.startswith("usage: train.py [--config FILE.yaml] [--FLAG VALUE ...]\n\nTrains an EAGLE-3 draft")
    assert "--dataset_train_split train_sft --assistant_only_loss \\\n" in help_
    titles = re.findall(r"^(\S.*):$", help_, re.M)
    ours = ["TrainScriptArguments", "Eagle3TrainingArguments", "TargetConfig"]
    assert [title for title in titles if title in ours] == ours and "inherited from trl's SFTConfig" in titles
    assert all(titles.index(title) < titles.index("inherited from trl's SFTConfig") for title in ours)
    # TRL's help of --load_in_4bit is about a model that is trained, and of others about what is not so here.
    for not_here in (
        "Works only with LoRA",
        "Path or name of the dataset",
        "Dataset split to use",
        "path to a tokenizer",
    ):
        assert not_here not in " ".join(help_.split())
    assert "--ignore_bias_buffers" not in help_
    offered = run_recipe("regenerate.py", "--help").stdout
    assert "--base_url" in offered and "--lora_r" not in offered and "--features_dir" not in offered
    assert "answer faster" in " ".join(offered.split())
    assert "Folder to write the features to" in " ".join(run_recipe("extract_features.py", "--help").stdout.split())


def test_a_folder_for_a_draft(script, run_recipe):
    assert script.default_output_dir("me/target", None) == script.OUTPUT_DIR.replace("<target>", "target")
    # Which may be where the given draft is.
    assert script.default_output_dir("me/target", "outputs/target-speculator.eagle3") == "trainer_output"
    assert f"(default:{script.OUTPUT_DIR})" in "".join(run_recipe("train.py", "--help").stdout.split())


def test_what_fails_before_the_work(files, tmp_path, run_recipe):
    make_target("llama").save_pretrained(tmp_path / "target")
    Eagle3ForSpeculation.from_target(make_target("llama")).save_pretrained(tmp_path / "draft")
    adapted = get_peft_model(make_target("llama"), LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = "me/base"
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "file").touch()
    arguments = arguments_of(files, tmp_path / "out")
    for name, value, told in (
        ("model_name_or_path", "target", "FileNotFoundError: .*target has no tokenizer. Save the target's there"),
        ("model_name_or_path", "draft", "draft is a draft, not a target"),
        ("model_name_or_path", "adapter", "adapter is an adapter of me/base, not a whole model. Merge it"),
        ("model_name_or_path", "", r"some of its folders have one: \['draft', 'target'\]. Pass one"),
        ("output_dir", "file/out", "cannot be written to.*Choose another `--output_dir`"),
    ):
        result = run_recipe("train.py", *arguments, f"--{name}", tmp_path / value)
        assert result.returncode == 1 and re.search(told, result.stderr)
    result = run_recipe("benchmark.py", "--target", tmp_path / "draft")
    assert result.returncode == 1 and "draft is a draft, not a target" in result.stderr


def test_images(files, tmp_path, run_recipe):
    """Also of a stream in two processes."""
    target, _ = make(gemma3, 0)
    target.save_pretrained(tmp_path / "target")
    make_processor(gemma3).save_pretrained(tmp_path / "target")
    rows = []
    for number in range(8):
        make_image(number).save(tmp_path / f"{number}.png")
        images = [str(tmp_path / f"{number}.png")][: number % 3]
        rows.append({"images": images, "messages": [user(f"what is {number}"), assistant("this")]})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = arguments_of(files, tmp_path / "out", max_steps=2)
    names = {"--model_name_or_path": tmp_path / "target", "--dataset_name": tmp_path / "data.jsonl"}
    for name, value in names.items():
        arguments[arguments.index(name) + 1] = value
    arguments += ["--ttt_steps", 2, "--assistant_only_loss", "--per_device_train_batch_size"]
    run_recipe("train.py", *arguments, 4)
    assert json.loads((tmp_path / "out" / "training.json").read_text())["rows_with_images"] == 5
    arguments[arguments.index("--output_dir") + 1] = tmp_path / "streamed"
    alone = run_recipe("train.py", *arguments, 4, "--dataset_streaming")
    arguments[arguments.index("--output_dir") + 1] = tmp_path / "in-two"
    command = (RECIPES / "train.py", *arguments, 2, "--dataset_streaming")
    in_two = run_in_two_processes("ddp", tmp_path, *map(str, command))
    assert len(losses(alone)) == 2 and losses(in_two) == pytest.approx(losses(alone), rel=2e-3)
