"""How often a step of training waits for the device, and how many operations it launches. Counted on a CPU."""

import pytest
import torch
from conftest import VOCAB_SIZE, make_prompt, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import make_ttt_batch

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.training.ttt import ttt_loss


class Launches(TorchDispatchMode):
    """Counts operations, and those that make the host wait for a GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.num, self.waits = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not func.is_view
        if func.overloadpacket.__name__ in self.WAITS:
            self.waits.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "num_waits", "most"),
    [({}, 0, 1700), ({"row_share": 0.6}, 0, 1900), ({"row_share": 0.6, "sampled_vocab_size": 8}, 1, 1900)],
)
def test_an_unroll_does_not_wait_for_the_device(settings, num_waits, most):
    target = make_target("llama")
    torch.manual_seed(0)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(0, VOCAB_SIZE, 2))
    batch = make_ttt_batch(target, draft, make_prompt(64))
    with Launches() as launches:
        ttt_loss(draft, batch, 5, **settings).loss_sums.sum().backward()
    assert len(launches.waits) == num_waits
    assert launches.num < most
