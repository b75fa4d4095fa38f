"""Pushing to a Hub on this machine, by the real client."""

import json
import re
import shutil
from concurrent.futures import Future

import huggingface_hub
import pytest
import torch
import trainers
from conftest import files_in, make_baseline, make_draft, make_prompt, make_target
from hub.test_card import BENCHMARK, TRAINING
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from loopback_hub import VALIDATES_CARDS_HERE, sha_of
from peft import LoraConfig
from transformers import AutoModel

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.evaluation import BenchmarkResults
from hf_eagle3.hub import push_draft, repo_name
from hf_eagle3.making import FORMS
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest


REPO, OF_TRAINER = "me/tiny-speculator.eagle3", "me/Model-8B-speculator.eagle3"
THOUGHTS = b"## Limits", b"## Limits, and what I think of it"


@pytest.fixture
def draft():
    return make_draft(make_target("llama"), [make_prompt(5)])


def benchmark_of(draft):
    run = BENCHMARK.run | {"draft_weights": weights_digest(draft.state_dict())}
    return BenchmarkResults(run, BENCHMARK.measurements)


def training_of(draft):
    return TRAINING | {"draft_weights": weights_digest(draft.state_dict())}


def files_of(hub, repo=REPO, revision="main"):
    return hub.repos[repo][revision][-1]


def card_of(hub, repo=REPO):
    return ModelCard(files_of(hub, repo)["README.md"].decode())


def test_everything_in_one_commit(hub, draft):
    records = {"benchmark": benchmark_of(draft), "training": training_of(draft)}
    commit = push_draft(draft, REPO, **records, license="mit", private=True, commit_message="Mine")
    assert len(hub.repos[REPO]["main"]) == 2 and REPO in hub.private  # the empty repo's commit, and ours
    files = files_of(hub)
    assert {"model.safetensors", "config.json", "generation_config.json", "modeling_eagle3.py"} <= files.keys()
    assert {"training.json", "benchmark.jsonl", "acceptance.png"} <= files.keys()
    assert len(files["acceptance.png"]) > 1000 and commit.commit_message == "Mine"
    card = card_of(hub)
    assert card.data.license == "mit" and "2.25x" in card.text and "me/chats" in card.text

    # Other weights: what was measured with the first ones goes with them.
    with torch.no_grad():
        draft.fc.weight += 0.1
    with pytest.raises(ValueError, match="benchmark record is about other weights"):
        push_draft(draft, REPO, benchmark=benchmark_of(make_draft(make_target("qwen3"), [make_prompt(5)])))
    draft.push_to_hub(REPO)
    assert not {"training.json", "benchmark.jsonl", "acceptance.png"} & files_of(hub).keys()
    card = card_of(hub)
    assert "Not measured yet." in card.text and card.data.license == "mit"


def test_what_belongs_to_other_weights_goes(hub, draft):
    """The configuration of an adapter makes peft look for weights that are gone. Code of earlier versions goes, too."""
    push_draft(draft, REPO)
    others = ("adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
    others += ("slots_eagle3.py",)
    files_of(hub).update(dict.fromkeys(others, b"{}"))
    kept = {"last-checkpoint/model.safetensors": b"of a training", "small/adapter_config.json": b"of another draft"}
    kept |= {"my_eagle3.py": b"of its owner"}
    files_of(hub).update(kept)
    push_draft(draft, REPO)
    assert not files_of(hub).keys() & set(others) and "model.safetensors" in files_of(hub)
    assert kept.items() <= files_of(hub).items()


@pytest.mark.parametrize("file", ["of a target", "adapter_model.safetensors", "unet/model.safetensors"])
def test_a_repo_of_another_model_stays(hub, draft, tokenizer, tmp_path, file):
    files = {file: b""}
    if file == "of a target":
        make_target("llama").save_pretrained(tmp_path / "target")
        files = files_in(tmp_path / "target")
    hub.repos["me/other"] = {"main": [{}, files]}
    for revision in (None, "new-branch"):
        with pytest.raises(ValueError, match="me/other has .* of another model"):
            push_draft(draft, "me/other", revision=revision)
    with pytest.raises(ValueError, match="me/other has .* of another model"):
        make_trainer(tmp_path, tokenizer, hub_model_id="me/other")
    assert hub.repos["me/other"] == {"main": [{}, files]}


def test_drafts_in_folders_of_their_own(hub, draft, tmp_path):
    draft.save_pretrained(tmp_path)
    others = {f"small/{name}": content for name, content in files_in(tmp_path).items()}
    hub.repos["me/several"] = {"main": [others]}
    push_draft(draft, "me/several")
    assert others.items() <= files_of(hub, "me/several").items() and "config.json" in files_of(hub, "me/several")
    config = json.loads(others["small/config.json"])
    flat = {"architectures": ["LlamaForCausalLMEagle3"], **config["transformer_layer_config"]}
    others["small/config.json"] = json.dumps(flat).encode()  # the names of the tensors show it
    hub.repos["me/flat"] = {"main": [others]}
    push_draft(draft, "me/flat")
    hub.repos["me/both"] = {"main": [{**others, "small/unet/model.safetensors": b""}]}
    with pytest.raises(ValueError, match="me/both has small/unet/model.safetensors of another model"):
        push_draft(draft, "me/both")


def test_an_adapter_is_not_pushed_beside_a_whole_model(hub, draft, tokenizer, tmp_path):
    def make_adapter(repo):
        whole = Eagle3ForSpeculation.from_target(make_target("llama"))
        lora = LoraConfig(target_modules=["q_proj"])
        return make_trainer(tmp_path, tokenizer, whole, lora, hub_model_id=repo, max_steps=1)

    push_draft(draft, REPO)
    with pytest.raises(ValueError, match="has a whole model, into which .* the draft's adapter"):
        make_adapter(REPO)
    for _ in range(2):  # its own repo, new and not
        trainer = make_adapter("me/adapter")
        trainer.train()
        trainer.push_to_hub()


def test_a_license_of_another_name(hub, draft):
    stated = {"license": "other", "license_name": "my-license", "license_link": "LICENSE"}
    if VALIDATES_CARDS_HERE:
        with pytest.raises(ValueError, match="license 'Apache 2.0'"):
            push_draft(draft, REPO, license="Apache 2.0")
        assert REPO not in hub.repos
    push_draft(draft, REPO, **stated)
    push_draft(draft, REPO)  # as it was
    assert {name: getattr(card_of(hub).data, name) for name in stated} == stated


def test_tags_stay(hub, draft):
    push_draft(draft, REPO, tags=["code"])
    push_draft(draft, REPO, tags="german")  # not a tag for each letter
    tags = card_of(hub).data.tags
    assert tags[-3:] == ["vllm", "code", "german"] and len(set(tags)) == len(tags)
    classic = Eagle3ForSpeculation.from_target(make_target("llama"), eagle_aux_hidden_state_layer_ids=[1, 2, 2])
    push_draft(classic, REPO)  # vLLM does not take it
    assert card_of(hub).data.tags == [tag for tag in tags if tag != "vllm"]


@pytest.mark.parametrize("target", ["big/Model-8B", "/models/Model-8B", "C:\\models\\Model-8B", "models/Model-8B/"])
def test_the_name_of_a_repo(target):
    assert repo_name(target) == "Model-8B-speculator.eagle3"


def test_a_download_that_is_forced_is_one(hub, draft, tmp_path):
    export(Eagle3ForSpeculation.from_target(make_target("llama"), **FORMS["classic"]), tmp_path / "sglang", "sglang")
    push_draft(draft, REPO)
    hub.repos["me/sglang"] = {"main": [files_in(tmp_path / "sglang")]}
    for repo in (REPO, "me/sglang"):
        for _ in range(2):
            hub.requests.clear()
            Eagle3ForSpeculation.from_pretrained(repo, force_download=True)
            assert hub.requests.count(("GET", f"/{repo}/resolve/main/model.safetensors")) == 1


def test_a_draft_of_remote_code_has_our_card_too(hub, draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    loaded = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert not isinstance(loaded, Eagle3ForSpeculation)
    loaded.push_to_hub(REPO)
    assert b"## Limits" in files_of(hub)["README.md"] and "modeling_eagle3.py" in files_of(hub)


def test_an_edited_card_stays(hub, draft, caplog):
    push_draft(draft, REPO)
    files_of(hub)["README.md"] = edited = files_of(hub)["README.md"].replace(*THOUGHTS)
    for name in (REPO, REPO.split("/")[1]):
        push_draft(draft, name)
        assert files_of(hub)["README.md"] == edited
    push_draft(draft, REPO, overwrite_card=True)
    assert b"what I think" not in files_of(hub)["README.md"]


def test_a_card_that_cannot_be_read_is_not_taken_for_none(hub, draft, monkeypatch):
    push_draft(draft, REPO)

    def unreachable(*arguments, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", unreachable)
    with pytest.raises(LocalEntryNotFoundError):
        push_draft(draft, REPO)
    assert len(hub.repos[REPO]["main"]) == 2


@pytest.mark.parametrize(
    "card", [b"---\nlicense: [\n---\n", b"---\n\tlicense: mit\n---\n", b"---\n- a\n---\n", b"---\n---\n\xe9"]
)
def test_a_broken_card_is_named(hub, draft, card):
    hub.repos[REPO] = {"main": [{"README.md": card}]}
    with pytest.raises(ValueError, match=f"(?s)The README.md of {REPO} is no card: .* delete it there"):
        push_draft(draft, REPO)
    assert len(hub.repos[REPO]["main"]) == 1


def test_branches(hub, draft):
    push_draft(draft, REPO)
    main = files_of(hub)
    push_draft(draft.to(torch.bfloat16), REPO, revision="bf16")
    smaller = files_of(hub, revision="bf16")["model.safetensors"]
    assert files_of(hub) == main and len(smaller) < len(main["model.safetensors"])
    hub.repos[REPO]["refs/pr/1"] = [{}]  # a pull request
    push_draft(draft, REPO, revision="refs/pr/1")
    assert "model.safetensors" in files_of(hub, revision="refs/pr/1")


@pytest.mark.parametrize("where", ["lfs_put", "commit"])
def test_a_connection_that_is_cut(hub, draft, where):
    """Nothing half-pushed: the client tries again, or the next push does, and does not send what has arrived."""
    hub.cut = [where]
    try:
        push_draft(draft, REPO)
    except Exception as error:
        assert "disconnected" in str(error).lower() or "connection" in str(error).lower(), error
        assert files_of(hub) == {}
        push_draft(draft, REPO)
    assert hub.cut == [] and len(hub.repos[REPO]["main"]) == 2
    pushed = Eagle3ForSpeculation.from_pretrained(REPO)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(pushed.state_dict()[name], tensor)
    num_puts = sum(method == "PUT" for method, _ in hub.requests)
    assert num_puts == {"lfs_put": 2, "commit": 1}[where]


def test_no_token_and_not_ones_own(hub, draft, monkeypatch):
    with pytest.raises(Exception, match="You may not create you/draft") as error:
        push_draft(draft, "you/draft")
    assert error.value.response.status_code == 403 and "you/draft" not in hub.repos
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="hf auth login"):
        draft.push_to_hub(REPO)
    assert REPO not in hub.repos


def test_records_beside_a_draft_are_its_own(hub, draft, tmp_path, caplog):
    draft.save_pretrained(tmp_path / "draft")
    benchmark_of(draft).write(tmp_path / "draft" / "benchmark.jsonl")
    Eagle3ForSpeculation.from_pretrained(tmp_path / "draft").push_to_hub(REPO)
    assert "benchmark.jsonl" in files_of(hub)
    # Copied to another draft's folder, and of another program.
    stale = benchmark_of(make_draft(make_target("qwen3"), [make_prompt(5)]))
    stale.write(tmp_path / "draft" / "benchmark.jsonl")
    (tmp_path / "draft" / "training.json").write_text('{"loss": 2.5}')
    Eagle3ForSpeculation.from_pretrained(tmp_path / "draft").push_to_hub(REPO)
    assert not {"benchmark.jsonl", "training.json"} & files_of(hub).keys()
    assert "is about other weights than this draft's" in caplog.text


@pytest.mark.parametrize(
    "name, content",
    [
        ("training.json", '{"seed": '),
        ("training.json", "5"),
        ("benchmark.jsonl", "5"),
        ("benchmark.jsonl", '{"environment": {}}\n{"task": "gsm8k"}'),
    ],
)
def test_a_broken_record_is_named(hub, draft, tmp_path, name, content):
    draft.save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / name).write_text(content)
    told = f"draft/{name} (is not valid JSON|does not hold|holds no results|has measurements)"
    with pytest.raises(ValueError, match=told):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "draft").push_to_hub(REPO)


def make_trainer(tmp_path, tokenizer, model=None, peft_config=None, target_name="big/Model-8B", **settings):
    target = make_target("llama")
    target.config._name_or_path = target_name
    settings = {"max_steps": 2, "ttt_steps": 1, "per_device_train_batch_size": 8, **settings}
    settings |= {"push_to_hub": True, "hub_token": "hf_secret", "peft_config": peft_config}
    return trainers.make_trainer(tmp_path / "run", tokenizer, model, target=target, **settings)


def test_trainer(hub, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer)
    trainer.train()
    trainer.push_to_hub(dataset_name="me/chats", tags=["code"])
    repo = OF_TRAINER
    assert len(hub.repos[repo]["main"]) == 2
    files, card = files_of(hub, repo), card_of(hub, repo)
    assert card.data.base_model == "big/Model-8B" and card.data.datasets == ["me/chats"]
    assert "2 steps of 8 sequences" in card.text and "max_steps: 2" in card.text
    assert not any(b"hf_secret" in content for content in files.values())
    record = json.loads(files["training.json"])
    assert record["draft_weights"] == weights_digest(Eagle3ForSpeculation.from_pretrained(repo).state_dict())
    assert record["arguments"]["dataset_name"] == "me/chats"
    push_draft(Eagle3ForSpeculation.from_pretrained(repo), repo, license="mit")  # the card again, with a license
    # A benchmark of these weights stays, and one of others goes.
    others = BenchmarkResults(BENCHMARK.run | {"draft_weights": "those before"}, BENCHMARK.measurements)
    others.write(tmp_path / "others.jsonl")
    benchmark_of(trainer.draft).write(tmp_path / "own.jsonl")
    files_of(hub, repo)["acceptance.png"] = b""
    for benchmark in ("own", "others"):
        files_of(hub, repo)["benchmark.jsonl"] = (tmp_path / f"{benchmark}.jsonl").read_bytes()
        trainer.push_to_hub()
        about = {"benchmark.jsonl", "acceptance.png"}
        assert about & files_of(hub, repo).keys() == (about if benchmark == "own" else set())
    data = card_of(hub, repo).data
    assert data.license == "mit" and "code" in data.tags
    # What somebody has written on the card since is not lost.
    files_of(hub, repo)["README.md"] = edited = files_of(hub, repo)["README.md"].replace(*THOUGHTS)
    trainer.push_to_hub()
    assert files_of(hub, repo)["README.md"] == edited and len(hub.repos[repo]["main"]) == 7


def test_training_goes_on_without_the_hub(hub, tokenizer, tmp_path, monkeypatch):
    """Which is asked for its card before each checkpoint, and may hang up."""

    def is_down(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "hub_strategy": "end"}
    trainer = make_trainer(tmp_path, tokenizer, **settings)
    hub.cut = ["resolve"] * 20
    trainer.train()
    assert trainer.state.global_step == 1 and len(hub.cut) < 20
    hub.cut = []
    monkeypatch.setattr(HfApi, "hf_hub_download", is_down)
    trainer.train()
    assert trainer.state.global_step == 1 and (tmp_path / "run" / "checkpoint-1" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "README.md").exists()  # which might replace one that was edited


def test_recipes_say_what_was_not_pushed(hub, tokenizer, tmp_path, run_recipe):
    make_target("llama").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text('{"text": "what is up with that"}\n' * 4)
    names = ("--model_name_or_path", tmp_path / "target", "--dataset_name", tmp_path / "texts.jsonl", "--output_dir")
    settings = ("--use_cpu", "--max_steps", 1, "--report_to", "none", "--save_strategy", "no")
    settings += ("--hub_model_id", "me/run")
    hub.cut = ["commit"]
    result = run_recipe("train.py", *names, tmp_path / "draft", *settings, "--push_to_hub")
    assert result.returncode == 1 and re.search(r"was not pushed .*recipes/push.py", result.stderr, re.S)
    assert (tmp_path / "draft" / "model.safetensors").exists() and hub.cut == []
    regenerate = ("regenerate.py", *names, tmp_path / "rows", "--prompt_tokens", 4, "--max_new_tokens", 3)
    regenerate += ("--push_to_hub",)
    assert "Error: Repo id" in run_recipe(*regenerate, "my rows").stderr
    assert not (tmp_path / "rows").exists()
    hub.cut = ["commit"]
    result = run_recipe(*regenerate, "me/rows")
    assert result.returncode == 1 and "were not pushed" in result.stderr and hub.cut == []
    assert run_recipe(*regenerate, "me/rows").returncode == 0


def test_notes_in_the_folder_stay(hub, tokenizer, tmp_path):
    (tmp_path / "run").mkdir()
    notes = tmp_path / "run" / "README.md"
    notes.write_text("# my own notes\n")
    trainer = make_trainer(tmp_path, tokenizer, save_strategy="steps", save_steps=1)
    trainer.train()
    assert notes.read_text() == "# my own notes\n"
    notes.unlink()
    trainer.create_model_card()
    rendered = notes.read_text()
    trainer.create_model_card()  # over its own
    notes.write_text(rendered.replace("## Limits", "## Limits, and what I think of it"))
    trainer.create_model_card()
    assert "what I think of it" in notes.read_text()


def test_a_trainer_keeps_paths_of_this_machine_to_itself(hub, tokenizer, tmp_path):
    name = str(tmp_path / "secret-folder" / "target")
    trainer = make_trainer(tmp_path, tokenizer, target_name=name, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.push_to_hub()
    files = files_of(hub, "me/target-speculator.eagle3")
    ours = {name: content for name, content in files.items() if name != "training_args.bin"}
    assert len(ours) > 5 and not any(b"secret-folder" in content for content in ours.values())
    assert json.loads(ours["config.json"])["speculators_config"]["verifier"]["name_or_path"] == "target"
    assert trainer.draft.config.verifier == name


def test_an_adapter_keeps_paths_of_this_machine_to_itself(hub, tokenizer, tmp_path):
    folder = tmp_path / "secret-folder" / "base"
    Eagle3ForSpeculation.from_target(make_target("llama")).save_pretrained(folder)
    draft = Eagle3ForSpeculation.from_pretrained(folder)
    trainer = make_trainer(tmp_path, tokenizer, model=draft, peft_config=LoraConfig(target_modules=["q_proj"]))
    trainer.train()
    trainer.push_to_hub()
    ours = {name: content for name, content in files_of(hub, "me/run").items() if name != "training_args.bin"}
    assert not any(b"secret-folder" in content for content in ours.values())
    assert json.loads(ours["adapter_config.json"])["base_model_name_or_path"] == "base"


def test_checkpoints_that_are_pushed_are_whole(hub, tokenizer, tmp_path):
    trainer = make_trainer(tmp_path, tokenizer, save_strategy="steps", save_steps=1, hub_always_push=True)
    trainer.train()
    trainer._finish_current_push()
    repo = OF_TRAINER
    whole = {"model.safetensors", "modeling_eagle3.py", "training.json"}
    for files in hub.repos[repo]["main"][1:]:
        assert whole <= files.keys()
        assert not any(b"hf_secret" in content for content in files.values())
        assert not {"checkpoint_files.json", "trainer_state.json"} & files.keys()
    record = json.loads(files_of(hub, repo)["training.json"])
    pushed = Eagle3ForSpeculation.from_pretrained(repo)
    assert record["draft_weights"] == weights_digest(pushed.state_dict()) and record["steps"] == 2
    # Nothing is put in the place of what is being pushed.
    (tmp_path / "run" / "training.json").write_text("being pushed")
    trainer.args.hub_always_push = False
    trainer.push_in_progress.jobs[0] = Future()
    trainer._push_from_checkpoint(str(tmp_path / "run" / "checkpoint-1"))
    assert (tmp_path / "run" / "training.json").read_text() == "being pushed"


def test_an_adapter_has_a_repo_of_its_own(hub, tokenizer, tmp_path):
    repo, draft = OF_TRAINER, Eagle3ForSpeculation.from_target(make_target("llama"))
    draft.config.speculators_config["verifier"]["name_or_path"] = "big/Model-8B"
    draft.config._name_or_path = repo
    push_draft(draft, repo)
    whole = files_of(hub, repo)
    trainer = make_trainer(tmp_path, tokenizer, model=draft, peft_config=LoraConfig(target_modules=["q_proj"]))
    trainer.train()
    trainer.push_to_hub()
    assert files_of(hub, repo) is whole
    card = card_of(hub, "me/run")
    assert card.data.base_model == repo and card.data.base_model_relation == "adapter"


def test_a_draft_pushed_from_the_hub_keeps_its_records(hub, draft, tmp_path):
    push_draft(draft, REPO, training=training_of(draft), benchmark=benchmark_of(draft))
    before = files_of(hub)
    before["notes.py"] = b"# mine"
    Eagle3ForSpeculation.from_pretrained(REPO).push_to_hub(REPO)
    after = files_of(hub)
    assert after["training.json"] == before["training.json"] and after["benchmark.jsonl"] == before["benchmark.jsonl"]
    assert after["notes.py"] == b"# mine"


def test_a_card_tells_of_no_other_weights(hub, draft, tmp_path):
    """Also if somebody uploaded the draft without its records, beside those of the draft before."""
    push_draft(draft, REPO, training=training_of(draft), benchmark=benchmark_of(draft))
    make_draft(make_target("qwen3"), [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    HfApi().upload_folder(repo_id=REPO, folder_path=tmp_path / "draft")
    Eagle3ForSpeculation.from_pretrained(REPO).push_to_hub(REPO)
    card = files_of(hub)["README.md"].decode()
    assert "Not measured yet." in card and "How it was trained is not recorded" in card


def test_a_header_that_cannot_be_fetched(hub, tmp_path, monkeypatch):
    """Without the names of its tensors, a draft would be a Llama with random weights."""
    target = make_target("llama", num_hidden_layers=8)
    export(Eagle3ForSpeculation.from_target(target, **FORMS["classic"]), tmp_path / "sglang", "sglang")
    for repo in (REPO, "me/other"):
        files = {f"small/{name}": content for name, content in files_in(tmp_path / "sglang").items()}
        hub.repos[repo] = {"main": [files]}
        assert type(AutoModel.from_pretrained(repo, subfolder="small")) is Eagle3ForSpeculation
        monkeypatch.setattr(HfApi, "parse_safetensors_file_metadata", lambda *args, **kwargs: 1 / 0)


def test_records_of_a_private_repo_and_of_a_folder_that_is_gone(hub, draft, tmp_path, monkeypatch):
    push_draft(draft, REPO, training=training_of(draft), private=True)
    monkeypatch.delenv("HF_TOKEN")
    loaded = Eagle3ForSpeculation.from_pretrained(REPO, token="hf_mine")
    loaded.push_to_hub(REPO, token="hf_mine")
    assert "training.json" in files_of(hub)
    loaded.save_pretrained(tmp_path / "draft")
    loaded = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    shutil.rmtree(tmp_path / "draft")
    loaded.push_to_hub("me/moved", token="hf_mine")
    assert "model.safetensors" in files_of(hub, "me/moved")


def test_records_are_of_the_revision_and_folder_that_was_loaded(hub, draft, tmp_path):
    push_draft(draft, REPO, training=training_of(draft))
    hub.repos[REPO]["two"] = [{f"sub/{name}": content for name, content in files_of(hub).items()}]
    other = make_draft(make_target("llama"), [make_prompt(5)], seed=1)
    push_draft(other, REPO, training=training_of(other))
    for name, content in hub.repos[REPO]["two"][0].items():
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for source, revision in ((REPO, "two"), (tmp_path / "runs", "main")):
        loaded = Eagle3ForSpeculation.from_pretrained(source, revision=revision, subfolder="sub")
        push_draft(loaded, "me/again")
        assert files_of(hub, "me/again")["training.json"] == hub.repos[REPO]["two"][0]["sub/training.json"]
        hub.repos.pop("me/again")


@pytest.mark.parametrize("repo", ["me/target", "target"])
def test_drafts_of_other_methods_leave_repos_of_other_models_alone(hub, repo):
    hub.repos["me/target"] = {"main": [{"config.json": b"{}", "model.safetensors": b"weights"}]}
    with pytest.raises(ValueError, match="has config.json of another model"):
        make_baseline("medusa", make_target("llama")).push_to_hub(repo)
    assert len(hub.repos["me/target"]["main"]) == 1


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash"])
def test_paths_of_this_machine_stay_here(hub, draft, tmp_path, method):
    folder = tmp_path / "secret-folder" / "target"
    folder.mkdir(parents=True)
    if method != "eagle3":
        draft = make_baseline(method, make_target("llama"))
    draft.config.speculators_config["verifier"]["name_or_path"] = str(folder)
    if method == "eagle3":
        benchmark = benchmark_of(draft)
        benchmark.run["arguments"]["target"] = str(folder)
        push_draft(draft, REPO, benchmark=benchmark)
        assert b'"target": "target"' in files_of(hub)["benchmark.jsonl"] and card_of(hub).data.base_model is None
    else:
        draft.push_to_hub(REPO)
    assert not any(b"secret-folder" in content for content in files_of(hub).values())
    assert b'"target"' in files_of(hub)["config.json"] and "secret-folder" in draft.config.verifier


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_saving_does_not_push(hub, draft, tmp_path, method):
    draft = draft if method == "eagle3" else make_baseline(method, make_target("llama"))
    hub.repos["me/target"] = {"main": [{"config.json": b"{}", "model.safetensors": b"weights"}]}
    with pytest.raises(ValueError, match=r"over whatever is in the repo. Call `draft.push_to_hub\(repo_id\)`"):
        draft.save_pretrained(tmp_path / "target", push_to_hub=True, repo_id="me/target")
    assert len(hub.repos["me/target"]["main"]) == 1 and not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["outputs/target", "runs/outputs/target", r"outputs\target"])
def test_a_target_in_a_folder_that_is_gone(hub, draft, name):
    draft.config.speculators_config["verifier"]["name_or_path"] = name
    with pytest.raises(ValueError, match=f"target is {re.escape(repr(name))}, .* Push with .*--target OWNER/NAME"):
        draft.push_to_hub(REPO)
    assert REPO not in hub.repos


def test_push_recipe(hub, draft, tmp_path, run_recipe, caplog):
    draft.save_pretrained(tmp_path / "draft")
    benchmark_of(draft).write(tmp_path / "results.jsonl")
    options = ["--benchmark", tmp_path / "results.jsonl", "--target", "big/Model-8B", "--dtype", "bfloat16"]
    run_recipe("push.py", tmp_path, "--draft_subfolder", "draft", *options, "--dry_run", tmp_path / "dry")
    assert hub.requests == [] and (tmp_path / "dry" / "acceptance.png").exists()
    result = run_recipe("push.py", tmp_path / "draft", *options, "--private")
    repo = OF_TRAINER
    files = files_of(hub, repo)
    assert repo in hub.private and f"commit/{sha_of(files)}" in result.stdout
    assert all((tmp_path / "dry" / name).read_bytes() == files[name] for name in ("config.json", "benchmark.jsonl"))
    pushed = Eagle3ForSpeculation.from_pretrained(repo)
    assert pushed.dtype == torch.bfloat16 and pushed.config.verifier == "big/Model-8B"
    export(draft, tmp_path / "flat", "sglang")
    result = run_recipe("push.py", tmp_path / "flat")
    assert result.returncode == 2 and "run recipes/export.py --to speculators --target first" in result.stderr
    caplog.clear()
    run_recipe("push.py", tmp_path / "flat", "--repo_id", "me/flat", "--dry_run", tmp_path / "flat-dry")
    assert "does not name its target" in caplog.text and "nobody else can use" not in caplog.text
    del draft.config.speculators_config["verifier"]
    draft.save_pretrained(tmp_path / "unnamed")
    result = run_recipe("push.py", tmp_path / "unnamed", "--target", "big/Model-8B", "--dry_run", tmp_path / "named")
    assert result.returncode == 0 and "big/Model-8B" in (tmp_path / "named" / "config.json").read_text()
    result = run_recipe("push.py", tmp_path / "unnamed")
    assert result.returncode == 2 and "this draft names no target: pass --target" in result.stderr
