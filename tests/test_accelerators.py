"""What holds on an accelerator, seen on one that is made of a CPU (accelerator_on_cpu.py)."""

import json
from pathlib import Path

import pytest
from forked import run_forked
from torch.utils import backend_registration
from transformers.generation import utils as generation


PROGRAM = Path(__file__).parent / "accelerator_on_cpu.py"


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="older torch has no devices written in Python",
)
def test_nothing_is_mixed_with_the_host():
    result = run_forked(PROGRAM, "gemma3", "qwen3_5", "gemma3:dflash")
    assert result.returncode == 0, result.stderr[-3000:]
    cases = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(cases) == 4 + 3 + 4 + 3 * hasattr(generation, "move_to_device")
    for family, lengths, policy, settings, is_prompt_on_host, is_equal, num_forwards, num_waits in cases:
        assert is_equal, (family, lengths, policy, settings)
        advances_in_step = family == "qwen3_5" and len(lengths) > 1
        if is_prompt_on_host or advances_in_step or "repetition_penalty" in settings:
            continue  # for a host that reads each step, or must know each token before the next
        # Some are before the first step: three more with transformers 5.17.
        assert num_forwards <= num_waits <= num_forwards + 28, (family, lengths, policy, settings)
