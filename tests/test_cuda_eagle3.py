"""What decoding on CUDA devices needs, as far as a CPU can tell."""

import threading

import pytest
import torch

from hf_eagle3.remote_code.cuda_eagle3 import CudnnSwitch, captures_graphs
from hf_eagle3.remote_code.ragged_eagle3 import additive_mask, on_device


CUDA = torch.device("cuda")  # only its name is asked


@pytest.fixture(autouse=True)
def switch_of_torch():
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(was_on)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_last_call_to_end_sets_the_switch_back(was_on):
    torch.backends.cuda.enable_cudnn_sdp(was_on)
    switch, other_began, first_ended = CudnnSwitch(), threading.Event(), threading.Event()

    def call():
        with switch.off(CUDA):
            other_began.set()
            assert first_ended.wait(10)
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    seen, thread = [], threading.Thread(target=call)
    with switch.off(CUDA):
        thread.start()
        assert other_began.wait(10) and not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # the other one still goes on
    first_ended.set()
    thread.join()
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled() == was_on


def test_a_call_that_raises_sets_it_back_and_cpus_leave_it_alone():
    torch.backends.cuda.enable_cudnn_sdp(True)
    switch = CudnnSwitch()
    with pytest.raises(KeyError), switch.off(CUDA):
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with switch.off(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert captures_graphs(CUDA) and not captures_graphs(torch.device("cpu"))


@pytest.mark.parametrize("length", [1, 7, 8, 25, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_begin_where_fused_kernels_read_them(length, dtype):
    allowed = torch.rand(2, 3, length) < 0.5
    mask = additive_mask(allowed, dtype)
    assert mask.shape == allowed.shape and mask.dtype == dtype
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    assert torch.equal(mask == 0, allowed) and (mask[~allowed] == torch.finfo(dtype).min).all()


def test_numbers_of_the_host():
    assert on_device([[1, 2], [3, 4]], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]
    assert on_device(0.5, torch.device("cpu"), torch.float32).dtype == torch.float32
