import copy
import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trainers
from accelerate import PartialState
from conftest import CONVOLUTIONAL, FAMILIES, RECURRENT, assert_same_text, make_prompt, make_target
from datasets import Dataset
from filelock import FileLock
from messages import assistant, user
from peft import LoraConfig, get_peft_model
from trainers import losses
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, RemBertConfig

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer
from hf_eagle3.training import FeatureStore, features, target_states
from hf_eagle3.training.features import shard_path
from hf_eagle3.training.target_states import COUNTS_CHUNKS_BY_DOCUMENT, TargetStates


TEXTS = Dataset.from_dict({"text": [f"the {i} of {i * 7}"[: 5 + i] for i in range(20)]})


def make_trainer(tmp_path, tokenizer, target, dataset=TEXTS, eval_dataset=None, **arguments):
    short = {"max_steps": 4, "learning_rate": 1e-3, "draft_vocab_size": 30, "max_length": 64, "ttt_steps": 5}
    data = {"dataset": dataset, "target": target, "eval_dataset": eval_dataset}
    return trainers.make_trainer(tmp_path, tokenizer, **data, **{**short, **arguments})


STATEFUL = [*CONVOLUTIONAL, *RECURRENT]


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_states_and_logits_are_the_targets(family):
    target, layer_ids = make_target(family), [0, 2]
    states, prompt = TargetStates(target, layer_ids), make_prompt(12, batch_size=2)
    with torch.no_grad():
        expected = target(prompt, output_hidden_states=True)
    aux, last = states({"input_ids": prompt})
    torch.testing.assert_close(aux, torch.cat([expected.hidden_states[i] for i in layer_ids], dim=-1))
    torch.testing.assert_close(states.logits(last), expected.logits, atol=1e-4, rtol=1e-4)
    assert "forward" not in states.base_model.__dict__


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2"])  # plain, capped and scaled logits
def test_distributions_are_the_targets_whatever_the_pieces(family):
    """Over the whole vocabulary, and over a third of it."""
    target = make_target(family)
    states, shapes = TargetStates(target, [0, 2]), []
    _, last = states({"input_ids": make_prompt(12, batch_size=2)})
    logits = states.logits(last)
    target.get_output_embeddings().register_forward_hook(lambda module, args, output: shapes.append(output.shape[-1]))
    for step in (1, 3):
        draft_token_ids = torch.arange(0, logits.shape[-1], step)
        draft_logits, mass, tokens = states.distributions(last, draft_token_ids, rows_at_a_time=5)
        torch.testing.assert_close(draft_logits, logits[..., draft_token_ids], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mass, logits.softmax(-1)[..., draft_token_ids].sum(-1), atol=1e-5, rtol=1e-5)
        assert torch.equal(tokens, logits.argmax(-1))
        # Knowing the summary, the head computes the draft's tokens only. Cohere's logits pass through its own code, too.
        shapes.clear()
        known = states.distributions(last, draft_token_ids, states.summary(last), rows_at_a_time=5)
        for ours, expected in zip(known, (draft_logits, mass, tokens)):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert set(shapes[-5:]) == {len(draft_token_ids)} and shapes[0] == logits.shape[-1]


def test_a_head_behind_another_layer():
    config = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config |= {"input_embedding_size": 16, "output_embedding_size": 48, "is_decoder": True}
    target = AutoModelForCausalLM.from_config(RemBertConfig(**config)).eval()
    states, ids = TargetStates(target, [0, 1]), torch.arange(0, 96, 2)
    _, last = states({"input_ids": make_prompt(12)})
    logits, _, _ = states.distributions(last, ids, states.summary(last))
    torch.testing.assert_close(logits, states.logits(last)[..., ids], atol=1e-5, rtol=1e-5)


def test_a_head_whose_tokens_are_not_alike():
    """Chameleon never says tokens of images. So its logits are computed as one."""
    target = make_target("llama")
    forward = target.forward

    def without_some_tokens(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits[..., 90:] = torch.finfo(outputs.logits.dtype).min
        return outputs

    target.forward = without_some_tokens
    states, ids = TargetStates(target, [0, 2]), torch.arange(0, 96, 2)
    _, last = states({"input_ids": make_prompt(12)})
    _, mass, _ = states.distributions(last, ids, states.summary(last))
    torch.testing.assert_close(mass, states.logits(last).softmax(-1)[..., ids].sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *STATEFUL])
def test_packed_documents_are_read_apart(family):
    target = make_target(family)
    states = TargetStates(target, [0, 2])
    # Longer than the windows and chunks of the families that have them.
    documents = [make_prompt(length, seed=length) for length in (20, 3, 33, 1, 19)]
    packed = {
        "input_ids": torch.cat(documents, dim=1),
        "position_ids": torch.cat([torch.arange(each.shape[1]) for each in documents])[None],
    }
    # Asked with the first rows, whatever these have: processes that share a target's layers ask together.
    states({"input_ids": documents[0], "position_ids": torch.arange(20)[None]})
    assert states.keeps_documents_apart is not None
    aux, last = states(packed)
    for ours, theirs in zip((aux, last), zip(*(states({"input_ids": document}) for document in documents))):
        torch.testing.assert_close(ours, torch.cat(theirs, dim=1), atol=1e-3, rtol=1e-3)
    # transformers' gpt-oss does not tell its masks where documents begin, and states go on from one to the next.
    others = ("gpt_oss", *STATEFUL, *(() if COUNTS_CHUNKS_BY_DOCUMENT else ("llama4",)))
    assert states.keeps_documents_apart == (family not in others)


@pytest.mark.parametrize("is_flash", [False, True])
def test_packed_rows_are_one_row_for_flash_attention_only(monkeypatch, is_flash):
    states = TargetStates(make_target("llama"), [0, 2])
    monkeypatch.setattr(target_states, "is_flash_attention_requested", lambda config: is_flash)
    input_ids = make_prompt(12, batch_size=2)
    position_ids = torch.tensor([[*range(7), *range(5)], [*range(9), 0, 0, 0]])  # the last two tokens are padding
    batch = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": torch.ones(2, 12).long()}
    batch["attention_mask"][1, 10:] = 0
    forward, shapes = states._forward, []
    monkeypatch.setattr(
        states, "_forward", lambda **inputs: shapes.append(inputs["input_ids"].shape) or forward(**inputs)
    )
    found = states(batch)
    assert shapes[-1] == ((1, 24) if is_flash else (2, 12))
    for row, document in ((0, slice(0, 7)), (0, slice(7, 12)), (1, slice(0, 9)), (1, slice(9, 10))):
        for ours, theirs in zip(found, states({"input_ids": input_ids[row : row + 1, document]})):
            torch.testing.assert_close(ours[row : row + 1, document], theirs, atol=1e-5, rtol=1e-5)


def test_states_of_an_adapted_target():
    target = make_target("llama")
    adapted = get_peft_model(target, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    prompt = make_prompt(12)
    states = TargetStates(adapted, [0, 2])
    with torch.no_grad():
        expected = adapted(prompt).logits
    torch.testing.assert_close(states.logits(states({"input_ids": prompt})[1]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arguments", [{}, {"packing": True}, {"padding_free": True, "max_length": None}])
def test_training_from_features_gives_the_losses_of_training_from_the_target(tmp_path, tokenizer, arguments):
    target = make_target("gemma2")  # with a soft cap on its logits
    arguments = arguments | {"max_steps": 2, "ttt_steps": 4, "ttt_warmup": 0}
    online = make_trainer(tmp_path / "online", tokenizer, target, **arguments)
    store = online.extract_features(tmp_path / "features", rows_per_shard=3)
    assert store.num_shards == -(-len(online.train_dataset) // 3)
    expected = losses(online)
    calls = []
    for layer in target.base_model.layers:
        layer.register_forward_hook(lambda *args: calls.append(1))
    arguments = arguments | {"packing": False}  # rows are packed when they are extracted
    offline = make_trainer(tmp_path / "offline", tokenizer, target, FeatureStore(tmp_path / "features"), **arguments)
    assert losses(offline) == pytest.approx(expected, rel=1e-4)
    assert not calls
    rows = list(offline.train_dataset)
    batch = offline.data_collator([min(rows, key=lambda row: len(row["input_ids"])), rows[0]])
    if "attention_mask" in batch:  # padding has no probability
        assert torch.equal(batch["log_sums"] == torch.inf, batch["attention_mask"] == 0)
    ours, theirs = (trainer.state.log_history[-2] for trainer in (offline, online))
    assert ours["acceptance_rate_3"] == pytest.approx(theirs["acceptance_rate_3"], rel=1e-3)
    if arguments.keys() & {"padding_free"}:
        workers = make_trainer(tmp_path / "workers", tokenizer, target, store, dataloader_num_workers=2, **arguments)
        assert losses(workers) == pytest.approx(expected, rel=1e-4)


def test_a_collator_that_pads_on_the_left(tmp_path, tokenizer):
    """States are stored and placed from the left."""
    padding, target, runs = copy.deepcopy(tokenizer), make_target("llama"), []
    padding.pad_token = padding.convert_ids_to_tokens(0)
    for side in ("right", "left"):
        padding.padding_side = side
        trainer_class = partial(Eagle3Trainer, data_collator=DataCollatorForSeq2Seq(padding))
        few = {"trainer_class": trainer_class, "max_steps": 2, "ttt_steps": 2}
        trainer = make_trainer(tmp_path / side, tokenizer, target, **few)
        batch = trainer.data_collator([trainer.train_dataset[row] for row in (0, 19)])
        assert batch["attention_mask"][:, 0].all() and not batch["attention_mask"].all()
        store = trainer.extract_features(tmp_path / f"{side}-features")
        runs.append(losses(make_trainer(tmp_path / side, tokenizer, target, store, **few)))
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


def test_small_dtypes(tmp_path, tokenizer):
    target = make_target("llama")
    trainer = make_trainer(tmp_path / "online", tokenizer, target, max_steps=2, ttt_steps=2)
    for dtype in ("int8", torch.int64, "float8_e5m2", "fp8"):
        with pytest.raises(ValueError, match="can only be stored in one of"):
            trainer.extract_features(tmp_path / "features", dtype=dtype)
        assert not (tmp_path / "features").exists()
    exact, expected = trainer.extract_features(tmp_path / "exact"), losses(trainer)
    for dtype, tolerance, share in (("float8_e4m3fn", 0.05, 0.35), ("bfloat16", 0.005, 0.55)):
        store = trainer.extract_features(tmp_path / dtype, dtype=dtype)
        sizes = [os.path.getsize(shard_path(each.folder, 0)) for each in (exact, store)]
        assert sizes[1] < share * sizes[0]
        for row in range(20):
            assert (store[row]["states"].float() - exact[row]["states"]).norm() < tolerance * exact[row][
                "states"
            ].norm()
    offline = make_trainer(tmp_path / "small-run", tokenizer, target, store, max_steps=2, ttt_steps=2)
    assert losses(offline) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_runs_the_target(tmp_path, tokenizer, packing):
    target = make_target("llama")
    chats = [[user("abc"), assistant("d" * (10 + 5 * i))] for i in range(12)]
    chats = Dataset.from_dict({"messages": chats})
    arguments = {"packing": packing, "assistant_only_loss": True, "max_length": 32, "max_steps": 1, "ttt_steps": 2}
    store = make_trainer(tmp_path, tokenizer, target, chats, **arguments).extract_features(tmp_path / "features")
    arguments["packing"] = False
    with pytest.raises(ValueError, match="`eval_dataset` is a feature store"):
        make_trainer(tmp_path, tokenizer, target, store, eval_dataset=store, **arguments)
    trainer = make_trainer(tmp_path, tokenizer, target, store, eval_dataset=chats, **arguments)
    assert trainer.args.max_length == 32 and trainer.args.assistant_only_loss
    assert all(len(row["input_ids"]) <= 32 and row["labels"][0] == -100 for row in trainer.eval_dataset)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0 and metrics["eval_acceptance_length"] >= 1
    assert trainer.evaluate(chats.select(range(3)))["eval_loss"] > 0


def test_evaluation_learns_completions_where_training_did(tmp_path, tokenizer):
    """Packed rows do not say that they were prompts and completions."""
    pairs = Dataset.from_dict({"prompt": ["the end of 7 "] * 12, "completion": [f"is {i}" for i in range(12)]})
    online = make_trainer(tmp_path, tokenizer, make_target("llama"), pairs, pairs, packing=True, eval_packing=False)
    store = online.extract_features(tmp_path / "features")
    offline = make_trainer(tmp_path, tokenizer, make_target("llama"), store, pairs)
    labels = [trainer.data_collator(list(trainer.eval_dataset))["labels"] for trainer in (online, offline)]
    assert torch.equal(*labels) and 0 < (labels[0] != -100).sum() < labels[0].numel() / 2


def test_an_interrupted_extraction_goes_on(tmp_path, tokenizer):
    target = make_target("llama")
    trainer = make_trainer(tmp_path, tokenizer, target)
    expected = trainer.extract_features(tmp_path / "whole", rows_per_shard=4)
    forward, calls = trainer.target_states._forward, []

    def interrupted(**inputs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(**inputs)

    trainer.target_states._forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.extract_features(tmp_path / "parts", rows_per_shard=4)
    with pytest.raises(ValueError, match="not complete: 2 of 5 shards are missing"):
        FeatureStore(tmp_path / "parts")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("*.safetensors")}
    assert len(written) == 3
    index = (tmp_path / "parts" / "index.json").read_text()
    trainer.target_model.config._name_or_path = "moved/target"
    store = trainer.extract_features(tmp_path / "parts", rows_per_shard=4)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    assert (tmp_path / "parts" / "index.json").read_text() == index
    assert all(torch.equal(store[row][name], each) for row in range(20) for name, each in expected[row].items())
    with pytest.raises(ValueError, match="`rows_per_shard` must be at least 1, got 0"):
        trainer.extract_features(tmp_path / "none", rows_per_shard=0)


def test_a_disk_that_is_too_small(tmp_path, tokenizer, monkeypatch, caplog):
    trainer = make_trainer(tmp_path, tokenizer, make_target("llama"))
    num_tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    hidden_size, num_states = trainer.target_model.config.hidden_size, len(trainer.aux_layer_ids) + 1
    needed = num_tokens * num_states * hidden_size * 4
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    told = f"The states of {num_tokens:,} tokens take"
    with pytest.raises(ValueError, match=f"{told} 0.00 GB, .*--feature_dtype float8"):
        trainer.extract_features(tmp_path / "features")
    assert not [*(tmp_path / "features").glob("rows*")]
    # In fp8 they fit.
    with caplog.at_level("INFO", logger="hf_eagle3"):
        trainer.extract_features(tmp_path / "features", dtype="float8_e4m3fn")
    assert told in caplog.text


def test_features_of_a_stream_are_refused(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, make_target("llama"), TEXTS.to_iterable_dataset())
    with pytest.raises(ValueError, match="its rows are not numbered. Load the data whole"):
        trainer.extract_features(tmp_path)


@pytest.mark.parametrize("place, name", [(Dataset, "save_to_disk"), (features, "save_file")])
def test_an_extraction_that_is_killed_while_it_writes_goes_on(tmp_path, tokenizer, monkeypatch, place, name):
    trainer = make_trainer(tmp_path, tokenizer, make_target("llama"))
    write = getattr(place, name)

    def killed(content, path):
        write(content, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(place, name, killed)
        trainer.extract_features(tmp_path / "features")
    assert any(path.name.endswith(".unfinished") for path in (tmp_path / "features").iterdir())
    store = trainer.extract_features(tmp_path / "features")
    assert all(len(store[row]["states"]) == len(store.rows[row]["input_ids"]) for row in range(20))


def test_a_shard_that_is_cut_off_is_written_again(tmp_path, tokenizer):
    """A machine that crashes may lose a part of a file that is written."""
    trainer, folder = make_trainer(tmp_path, tokenizer, make_target("llama")), tmp_path / "features"
    expected = trainer.extract_features(folder, rows_per_shard=8)[3]["states"].clone()
    path = shard_path(folder, 0)
    for content in (path.read_bytes()[:-50], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="1 of 3 shards are missing or cut off, the first of them features-00000"):
            FeatureStore(folder)
        assert torch.equal(trainer.extract_features(folder, rows_per_shard=8)[3]["states"], expected)


def another_run(path):
    """A lock as another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def test_two_runs_do_not_write_into_one_folder(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, make_target("llama"))
    with another_run(tmp_path / "features" / ".lock"), pytest.raises(ValueError, match="Another run writes to"):
        trainer.extract_features(tmp_path / "features")
    assert trainer.extract_features(tmp_path / "features").num_shards == 1
    lock, refusal = tmp_path / ".cache" / "huggingface" / "training.lock", f"Another run writes to {tmp_path}. Wait"
    with another_run(lock), pytest.raises(ValueError, match=refusal):
        trainer.train()
    trainer.train()
    with another_run(lock):  # ours has ended
        pass


def test_no_process_writes_before_all_have_listed_the_missing_shards(tmp_path, tokenizer, monkeypatch):
    trainer, calls = make_trainer(tmp_path, tokenizer, make_target("llama")), []

    def recorded(place, name):
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args: (calls.append(name), function(*args))[1])

    recorded(features, "missing_shards")
    recorded(features, "write_shard")
    recorded(PartialState, "wait_for_everyone")
    trainer.extract_features(tmp_path / "features", rows_per_shard=10)
    first = calls.index("write_shard")
    assert calls[first - 2 : first + 2] == ["missing_shards", "wait_for_everyone", "write_shard", "write_shard"]


def test_features_of_something_else_are_refused(tmp_path, tokenizer):
    target, folder, mine = make_target("llama"), tmp_path / "features", tmp_path / "mine"
    trainer = make_trainer(tmp_path, tokenizer, target)
    store, other = trainer.extract_features(folder), copy.deepcopy(tokenizer)
    other.add_tokens(["new"])
    layers = {"model_init_kwargs": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    make, formatting = partial(make_trainer, tmp_path, tokenizer), partial(Eagle3Trainer, formatting_func=str)
    prepared = trainer.train_dataset
    masked = prepared.map(lambda row: {"labels": [-100, *row["labels"][1:]]})

    def extract(rows, folder=folder):
        trainer.train_dataset = rows
        trainer.extract_features(folder)

    mine.mkdir()
    (mine / "diary.txt").write_text("dear diary")
    for use, reason in (
        (lambda: make(make_target("llama", seed=1), store), "with another fingerprint"),
        (lambda: make(target, store, **layers), r"another aux_layer_ids \(\[1, 2, 3\] there, \[0, 1, 2\] here\)"),
        (lambda: make_trainer(tmp_path, other, target, store), "another tokenizer"),
        (lambda: make(target, store, packing=True), "packed when they are extracted"),
        (
            lambda: make(target, store, max_length=10),
            r"longest row .* has 14 tokens, .*max_length=10`. Pass `max_length=14`",
        ),
        (
            lambda: make(target, store, trainer_class=formatting),
            "`formatting_func` would have no effect: the rows of a feature",
        ),
        (lambda: extract(prepared.select(range(8))), "features of other rows"),
        (lambda: extract(masked), "features of other rows .* today's date, pass one with the date of the first"),
        (lambda: extract(prepared, mine), "not empty"),
        (lambda: FeatureStore(mine), "not a folder of features"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            use()
    index = json.loads((folder / "index.json").read_text())
    for content, reason in (
        (json.dumps({**index, "version": 99}), "version 99"),
        ("{", "index.json is not valid JSON"),
        ("{}", "has version None of the format"),
    ):
        (folder / "index.json").write_text(content)
        with pytest.raises(ValueError, match=reason):
            FeatureStore(folder)


def test_features_of_a_base_for_its_fine_tune(tmp_path, tokenizer, caplog):
    """Merged adapters leave the embeddings as they were, so the fingerprint is the same."""
    target = make_target("llama")
    target.config._name_or_path = "org/Base"
    trainer = make_trainer(tmp_path, tokenizer, target)
    store = trainer.extract_features(tmp_path / "features")
    target.config._name_or_path = "folder/Base"
    make_trainer(tmp_path, tokenizer, target, store)
    assert "were extracted from" not in caplog.text
    target.config._name_or_path = "org/Tuned"
    for use in (
        lambda: make_trainer(tmp_path, tokenizer, target, store),
        lambda: trainer.extract_features(store.folder),
    ):
        caplog.clear()
        use()
        assert "were extracted from org/Base, and the target is org/Tuned" in caplog.text
    tuned = make_target("llama")
    tuned.model.layers[1].mlp.up_proj.weight.data *= 1.1
    adapted = get_peft_model(make_target("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    for other in (tuned, adapted):
        with pytest.raises(ValueError, match="another weights_digest. Extract"):
            make_trainer(tmp_path, tokenizer, other, store)
        with pytest.raises(ValueError, match="features of other rows or another target"):
            make_trainer(tmp_path, tokenizer, other).extract_features(store.folder)
    losses(make_trainer(tmp_path, tokenizer, make_target("llama").bfloat16(), store, max_steps=1))
    del store.index["description"]["weights_digest"]  # of an older version
    (store.folder / "index.json").write_text(json.dumps(store.index))
    make_trainer(tmp_path, tokenizer, tuned, FeatureStore(store.folder))
    trainer.extract_features(store.folder)


def test_features_of_other_arguments_are_refused(tmp_path, tokenizer):
    target, folder = make_target("llama"), tmp_path / "features"
    chats = Dataset.from_dict({"messages": [[user("abc"), assistant("def")]] * 8})
    store = make_trainer(tmp_path, tokenizer, target, chats, assistant_only_loss=True).extract_features(folder)
    learns = "were extracted with `assistant_only_loss=True`, and this training has `assistant_only_loss=False`. Pass"
    with pytest.raises(ValueError, match=learns):
        make_trainer(tmp_path, tokenizer, target, store)
    cuts = "`truncation_mode='keep_start'`, and this training has `truncation_mode='keep_end'`"
    with pytest.raises(ValueError, match=cuts):
        make_trainer(tmp_path, tokenizer, target, store, assistant_only_loss=True, truncation_mode="keep_end")


def test_states_that_a_dtype_does_not_hold(tmp_path, tokenizer):
    target = make_target("llama")
    target.get_input_embeddings().weight.data *= 1e5
    with pytest.raises(ValueError, match="which torch.float16 cannot hold"):
        make_trainer(tmp_path, tokenizer, target).extract_features(tmp_path / "features", dtype="float16")
    assert not list((tmp_path / "features").glob("*.safetensors"))


def test_states_that_are_infinite(tmp_path, tokenizer):
    target = make_target("llama")
    target.get_input_embeddings().weight.data[5] = float("inf")
    trainer = make_trainer(tmp_path, tokenizer, target)
    trainer.train_dataset = Dataset.from_list([{"input_ids": [4, 5, 6], "labels": [4, 5, 6]}])
    for dtype in ("bfloat16", "float8_e4m3fn"):
        with pytest.raises(ValueError, match="states are not finite"):
            trainer.extract_features(tmp_path / dtype, dtype=dtype)
        assert not list((tmp_path / dtype).glob("*.safetensors"))


def test_a_fresh_draft_of_features_generates(tmp_path, tokenizer):
    """The target's layers are not needed to train it, not even loaded."""
    target = make_target("llama")
    store = make_trainer(tmp_path, tokenizer, target).extract_features(tmp_path / "features")
    target.base_model.layers.to("meta")
    trainer = make_trainer(tmp_path, tokenizer, target, store, max_steps=2, ttt_steps=2)
    assert len(losses(trainer)) == 2
    trainer.save_model(tmp_path / "draft")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    assert_same_text(make_target("llama"), draft, make_prompt(9))
