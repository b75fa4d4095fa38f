"""What decoding on CUDA devices needs, as far as a CPU can tell."""

import threading
import time
from unittest import mock

import pytest
import torch
from conftest import VOCAB_SIZE, make_batch, make_prompt
from operators import Operators

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.attention_eagle3 import additive_mask
from hf_eagle3.remote_code.devices_eagle3 import CudaGraph, CudnnSwitch, captures_graphs, on_device
from hf_eagle3.remote_code.drafter_eagle3 import can_be_captured


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
        with switch.off():
            other_began.set()
            assert first_ended.wait(10)
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    seen, thread = [], threading.Thread(target=call)
    with switch.off():
        thread.start()
        assert other_began.wait(10) and not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # the other one still goes on
    first_ended.set()
    thread.join()
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled() == was_on


def test_a_call_that_raises_sets_it_back():
    torch.backends.cuda.enable_cudnn_sdp(True)
    switch = CudnnSwitch()
    with pytest.raises(KeyError), switch.off():
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "call", [{}, {"do_sample": True}, {"cache_implementation": "static", "disable_compile": True}], ids=str
)
def test_apple_s_gpus_have_all_operators_of_decoding(target, call):
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(0, VOCAB_SIZE, 2))
    with Operators() as used:
        target.generate(**make_batch([5, 9]), assistant_model=draft, max_new_tokens=20, **call)
    assert not used.missing_on_apple_s_gpus() and "embedding" in used.names


def test_graphs_are_captured_on_cuda_only():
    assert captures_graphs(torch.device("cuda")) and not captures_graphs(torch.device("cpu"))


def test_a_draft_that_would_sync_is_not_captured(monkeypatch, target, draft):
    monkeypatch.setattr("hf_eagle3.remote_code.drafter_eagle3.captures_graphs", lambda device: True)
    table = target.get_input_embeddings()
    assert can_be_captured(draft, table)
    assert not can_be_captured(draft, torch.nn.Embedding(8, 8, device="meta"))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    monkeypatch.setattr(draft.config.transformer_layer_config, "rope_parameters", rope)
    assert not can_be_captured(draft, table)


@pytest.fixture
def cuda(monkeypatch):
    """Records what is asked of CUDA."""
    calls = mock.MagicMock()
    for name in ("CUDAGraph", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    monkeypatch.setattr(torch.cuda, "default_generators", [calls.generator])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", calls.clear, raising=False)
    calls.stream_of_device.device.index = 0
    return calls


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), KeyboardInterrupt()], ids=["fails", "interrupted"])
def test_a_capture_that_is_left_early_is_ended(cuda, error):
    def function(tensor):
        raise error

    stream, graph = mock.MagicMock(), cuda.CUDAGraph.return_value
    stream.device.index = 0
    graph.capture_end.side_effect = RuntimeError("the capture was invalidated")
    with pytest.raises(type(error)) as raised:
        CudaGraph(function, [torch.ones(1)], stream)
    assert raised.value is error  # not what the end of the capture says
    graph.capture_end.assert_called_once()
    assert not CudaGraph.lock.locked()
    cuda.current_stream.return_value.wait_stream.assert_called_once_with(stream)


def test_a_graph_has_workspaces_of_its_own(cuda):
    graph = CudaGraph(lambda tensor: [tensor], [torch.ones(1)], cuda.stream_of_device)
    begin, end = (
        cuda.mock_calls.index(getattr(mock.call.CUDAGraph(), f"capture_{name}")(**arguments))
        for name, arguments in (("begin", {"capture_error_mode": "thread_local"}), ("end", {}))
    )
    clears = [i for i, call in enumerate(cuda.mock_calls) if call == mock.call.clear()]
    assert clears[0] < begin < end < clears[1]
    graph(torch.zeros(1))
    assert graph.outputs[0].item() == 0


def test_other_threads_draw_from_a_state_that_no_capture_blocks(cuda):
    generator = cuda.generator
    own, states = generator.graphsafe_get_state.return_value, []
    cuda.CUDAGraph.return_value.capture_begin.side_effect = lambda **_: states.extend(generator.mock_calls)
    CudaGraph(lambda tensor: [tensor], [torch.ones(1)], cuda.stream_of_device)
    set_state = mock.call.graphsafe_set_state
    assert states[-1] == set_state(generator.clone_state.return_value)  # what the capture blocks
    assert generator.mock_calls[-1] == set_state(own)


def test_captures_wait_for_each_other(cuda):
    seen, entered, other = [], threading.Event(), []

    def slow(tensor):
        entered.set()
        time.sleep(0.05)  # the other thread would begin now
        seen.append("slow ends")
        return [tensor]

    def begin_another():
        entered.wait()
        CudaGraph(lambda tensor: other.append(list(seen)) or [tensor], [torch.ones(1)], cuda.stream_of_device)

    thread = threading.Thread(target=begin_another)
    thread.start()
    CudaGraph(slow, [torch.ones(1)], cuda.stream_of_device)
    thread.join()
    assert other == [["slow ends"]]


def test_it_is_off_while_a_draft_decodes_wherever_the_prompt_is(target, draft):
    torch.backends.cuda.enable_cudnn_sdp(True)
    seen = []
    handle = draft.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=8, do_sample=False)
    handle.remove()
    assert seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


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
