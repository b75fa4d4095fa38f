"""Loading a target to decode with."""

import pytest
import torch
from conftest import make_target

from hf_eagle3.checkpoints.target import load_on_device


@pytest.mark.parametrize("bits", [None, 4])
def test_a_device_map_replaces_the_device(tmp_path, bits):
    if bits is not None:
        pytest.importorskip("bitsandbytes")
    make_target("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    target = load_on_device(tmp_path, "no device", bits=bits, device_map="cpu")
    assert target.device == torch.device("cpu") and not target.training
    assert hasattr(target.config, "quantization_config") == (bits is not None)
