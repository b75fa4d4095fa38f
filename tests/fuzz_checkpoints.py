"""Broken checkpoints: each is refused with a message that tells something, or is the draft that was saved."""

import contextlib
import functools
import json
import math
import re
import shutil
import sys

import torch
from conftest import BLOCK_DRAFTS, make_block_draft, make_prompt, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.remote_code.configuration_eagle3 import config_digest
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest


target = functools.cache(make_target)
# Names of transformers' own errors that tell what is wrong, beside these.
CLEAR = (ValueError, OSError)
CLEAR_NAMES = {"SafetensorError"}
NEVER_LOADED = 'import pathlib\npathlib.Path(__file__).with_name("was_run").touch()\n'


def make_draft(rng):
    if rng.random() < 0.2:
        torch.manual_seed(rng.randrange(1000))
        overrides = rng.choice([{}, {"draft_token_ids": range(5, 40)}, {"has_own_embed_tokens": True}])
        return make_block_draft(rng.choice(list(BLOCK_DRAFTS)), target("llama"), **overrides)
    overrides = rng.choice(
        [
            {},
            {"fc_norm": False, "norm_output": False},
            {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
            {"model_type": "qwen3", "num_hidden_layers": 2},
            {"has_own_embed_tokens": True},
            {
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
                | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
            },
        ]
    )
    torch.manual_seed(rng.randrange(1000))
    draft = Eagle3ForSpeculation.from_target(target("llama"), range(5, rng.choice([40, 96])), **overrides)
    for weight in draft.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    return draft.to(rng.choice([torch.float32, torch.bfloat16])).eval()


# JSON -------------------------------------------------------------------------------------------------------------


def places(content, path=()):
    """All keys and indices in a JSON object, as paths."""
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def corrupt_json(rng, file) -> str:
    content = json.loads(file.read_text())
    *path, key = rng.choice(list(places(content)))
    parent = functools.reduce(lambda value, each: value[each], path, content)
    old = parent[key]
    way = rng.choice(["delete", "null", "negate", "zero", "huge", "tweak", "text", "list", "mapping", "flip", "add"])
    if way == "delete":
        del parent[key]
    elif way == "add":
        where = parent if isinstance(parent, dict) else content
        where["surprise"] = rng.choice([1, True, "on", None, False])
    else:
        new = {
            "null": None,
            "zero": 0,
            "huge": 10**7 + 1,
            "text": "surprise",
            "list": [old],
            "mapping": {"a": old},
            "flip": not old,
        }
        is_number = isinstance(old, int | float) and not isinstance(old, bool)
        new |= {"negate": -old if is_number else "-", "tweak": old + 1 if is_number else [old, old]}
        parent[key] = new[way]
    file.write_text(json.dumps(content))
    return f"{way} {file.name} {[*path, key]}, which was {old!r:.60}"


# Files ------------------------------------------------------------------------------------------------------------


def corrupt_file(rng, file) -> str:
    content = bytearray(file.read_bytes())
    way, place = rng.choice(["cut", "empty", "remove", "flip", "garbage", "zeros"]), rng.randrange(len(content))
    if way == "remove":
        file.unlink()
    else:
        if way == "flip":
            content[place] ^= 1 << rng.randrange(8)
        elif way == "zeros":
            content[place : place + 64] = bytes(len(content[place : place + 64]))
        file.write_bytes({"cut": content[:place], "empty": b"", "garbage": rng.randbytes(200)}.get(way, content))
    return f"{way} {file.name} at {place}"


def corrupt_tensors(rng, file) -> str:
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    way = rng.choice(["drop", "rename", "add", "shape", "dtype", "nan", "inf", "zero", "noise", "swap", "roll"])
    if way == "drop":
        del tensors[name]
    elif way == "rename":
        tensors[name + ".x"] = tensors.pop(name)
    elif way == "add":
        tensors["surprise.weight"] = torch.ones(3)
    elif way == "shape":
        tensors[name] = tensor[:-1].clone()
    elif way == "dtype":
        tensors[name] = tensor.to(rng.choice([torch.float16, torch.int8, torch.float64]))
    elif way == "swap":
        other = rng.choice([each for each in tensors if tensors[each].shape == tensor.shape])
        tensors[name], tensors[other] = tensors[other].clone(), tensor.clone()
    elif way == "roll":
        tensors[name] = tensor.roll(1, dims=0)
    elif way == "noise":
        tensors[name] = (tensor + torch.randn(tensor.shape)).to(tensor.dtype)
    else:
        tensor = tensor.clone()
        value = {"nan": math.nan, "inf": math.inf, "zero": 0}[way]
        with contextlib.suppress(RuntimeError, OverflowError):  # integers are never NaN
            tensor.view(-1)[slice(None) if way == "zero" else rng.randrange(tensor.numel())] = value
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{way} {name}"


def leave_the_folder(rng, folder) -> str:
    """An index of shards that names a file elsewhere, which is there."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = rng.choice(sorted(content["weight_map"]))
    part, outside = content["weight_map"][name], folder.parent / "outside"
    outside.mkdir()
    shutil.copy(folder / part, outside / part)
    elsewhere = rng.choice([f"../outside/{part}", str(outside / part), f"..\\outside\\{part}"])
    content["weight_map"] = {each: elsewhere if at == part else at for each, at in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    return f"index names {elsewhere}"


def code_of_the_folder(rng, folder) -> str:
    """Code in a folder that is none of the draft's."""
    file = rng.choice([*folder.glob("*.py"), *folder.glob("*/*.py")])
    file.write_text(NEVER_LOADED + file.read_text())
    return f"code in {file.name}"


def corrupt(rng, folder) -> str:
    ways = [corrupt_json] * 6 + [corrupt_file] * 3 + [corrupt_tensors] * 5
    has_index = (folder / "model.safetensors.index.json").exists()
    ways += [leave_the_folder] * 4 * has_index + [code_of_the_folder] * bool(list(folder.glob("*.py")))
    way = rng.choice(ways)
    if way is corrupt_json:
        return way(rng, rng.choice(sorted(file for file in folder.glob("*.json"))))
    if way is corrupt_file:
        return way(
            rng, rng.choice(sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors")))
        )
    if way is corrupt_tensors:
        return way(rng, rng.choice(sorted(folder.glob("*.safetensors"))))
    return way(rng, folder)


def run(rng, scratch) -> tuple[int, str | None]:
    draft, folder = make_draft(rng), scratch / "draft"
    is_block, draft_class = draft.config.model_type == "dflash", type(draft)
    form = rng.choice(["ours", "sharded"] if is_block else ["ours", "ours", "sharded", "sglang", "safeailab"])
    if form in ("ours", "sharded"):
        draft.save_pretrained(folder, max_shard_size="10KB" if form == "sharded" else "5GB")
    else:
        if form == "safeailab":  # which takes these of eight layers
            draft.config.eagle_aux_hidden_state_layer_ids = [2, 4, 5]
        try:
            export(draft, folder, form)
        except ValueError:  # it cannot be expressed there
            form = "ours"
            draft.save_pretrained(folder)
    what = corrupt(rng, folder)
    # Not with code that is not ours, or a map to it that is broken: there transformers fails before us. Only the package
    # explains what is wrong with a dtype or an index of shards.
    by_remote_code = (
        not is_block
        and form in ("ours", "sharded")
        and "code" not in what
        and not any(each in what for each in ("auto_map", "'dtype'", "index"))
        and rng.random() < 0.1
    )
    where = f"({draft.config.model_type}, {form}{', remote code' * by_remote_code}: {what})"
    try:
        if by_remote_code:
            loaded = AutoModel.from_pretrained(folder, trust_remote_code=True)
        else:
            loaded = draft_class.from_pretrained(folder, trust_remote_code=rng.choice([None, True]))
    except CLEAR as error:
        finding = None if len(str(error)) > 20 else f"an error that tells nothing: {error!r} {where}"
        return 1, finding
    except Exception as error:
        finding = None if type(error).__name__ in CLEAR_NAMES and len(str(error)) > 20 else f"{error!r} {where}"
        return 1, finding
    finally:
        if by_remote_code:
            for name in [name for name in sys.modules if "transformers_modules" in name]:
                del sys.modules[name]
    if list(folder.rglob("was_run")):
        return 1, f"code of the folder was run {where}"
    if form in ("ours", "sharded"):
        before, after = draft.state_dict(), loaded.state_dict()
        if is_block:  # the target's head is left out
            before.pop("lm_head.weight"), after.pop("lm_head.weight")
        if weights_digest(before) != weights_digest(after) or config_digest(loaded.config.to_dict()) != config_digest(
            draft.config.to_dict()
        ):
            return 1, f"loads as another draft, without a word {where}"
    prompt = make_prompt(7)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = target("llama").generate(prompt, **settings).tolist()
    try:
        actual = target("llama").generate(prompt, assistant_model=loaded, **settings).tolist()
    except ValueError as error:
        return 1, None if re.search("Pair each draft", str(error)) else f"loads, and then {error!r} {where}"
    except Exception as error:
        return 1, f"loads, and then {error!r} {where}"
    return 1, None if actual == expected else f"plain {expected}, ours {actual} {where}"
