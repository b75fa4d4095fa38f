"""Targets whose weights processes share: `torchrun`, on CPUs."""

import torch
from conftest import make_draft, make_prompt, make_target
from forked import run_in_two


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from hf_eagle3 import Eagle3ForSpeculation, assist

folder, = sys.argv[1:]
draft = Eagle3ForSpeculation.from_pretrained(folder + "/draft").eval()
draft.generation_config.update(assistant_confidence_threshold=0, tree_policy="auto")
prompt = torch.load(folder + "/prompt.pt")
for settings in ({"tp_plan": "auto"}, {"fsdp_size": 2}):  # tensor-parallel, and FSDP2
    config = DistributedConfig(**settings)
    target = AutoModelForCausalLM.from_pretrained(folder + "/target", distributed_config=config).eval()
    assert any(hasattr(weight, "full_tensor") for weight in target.parameters())
    for sampling in ({"do_sample": False}, {"do_sample": True}):
        texts = []
        for assistant in ({}, {"assistant_model": draft}):
            torch.manual_seed(0)
            texts.append(target.generate(prompt, max_new_tokens=12, synced_gpus=False, **sampling, **assistant))
        assert torch.equal(*texts), (settings, texts)
        # What each process measures differs: none decides by it.
        assert draft.last_generation.acceptance_length > 1 and draft.last_generation.plain_steps <= 1
# `generate` keeps processes in step unless it is told not to, which a draft does not take.
before = draft.last_generation
with assist(target, draft):
    text = target.generate(prompt, max_new_tokens=12, do_sample=False)
assert torch.equal(text, target.generate(prompt, max_new_tokens=12, do_sample=False, synced_gpus=False))
assert draft.last_generation is before
if dist.get_rank() == 0:
    print("equal")
dist.barrier()
dist.destroy_process_group()  # else a process may be aborted while its threads still talk
"""


def test_text_of_a_target_that_two_processes_share(tmp_path):
    target, prompt = make_target("llama"), make_prompt(11)
    target.save_pretrained(tmp_path / "target")
    make_draft(target, [prompt]).save_pretrained(tmp_path / "draft")
    torch.save(prompt, tmp_path / "prompt.pt")
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run_in_two(tmp_path / "script.py", tmp_path)
    assert result.returncode == 0 and "equal" in result.stdout, result.stderr[-3000:]
