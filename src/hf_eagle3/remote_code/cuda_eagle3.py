# SPDX-License-Identifier: Apache-2.0
"""What decoding on CUDA devices needs: attention kernels that take trees, and CUDA graphs of the draft."""

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


class CudnnSwitch:
    """Whether PyTorch may choose cuDNN's attention. The switch is the process's: the last call to end sets it back."""

    def __init__(self):
        self.lock, self.num_calls, self.was_on = threading.Lock(), 0, True

    @contextlib.contextmanager
    def off(self):
        """
        Turns it off, wherever target, draft and prompt are: layers may be on several devices. cuDNN's attention, PyTorch's first choice on H100, builds a plan for each new length of the cache,
        which takes longer than a step, and fails at some masks (https://github.com/pytorch/pytorch/issues/190321).
        """
        with self.lock:
            if self.num_calls == 0:
                self.was_on = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self.num_calls += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_calls -= 1
                if self.num_calls == 0:
                    torch.backends.cuda.enable_cudnn_sdp(self.was_on)


CUDNN_ATTENTION = CudnnSwitch()


def captures_graphs(device: torch.device) -> bool:
    """Whether functions of fixed shapes are captured on a device."""
    return device.type == "cuda" and not CudaGraph.has_failed


class CudaGraph:
    """
    A function of tensors as a CUDA graph, which the host launches at once instead of kernel by kernel.

    Args:
        function (`Callable`):
            Takes `inputs` and returns tensors, or `None` in place of some. It never waits for the device, and whatever
            else it reads and writes stays where it is. It is run once more than it is called.
        inputs (sequence of `torch.Tensor`, some of which may be `None`): Like those of all calls.
    """

    has_failed = False  # in this process

    def __init__(self, function: Callable, inputs: Sequence[torch.Tensor | None]):
        self.inputs = [None if each is None else each.clone() for each in inputs]
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*self.inputs)  # loads kernels and makes workspaces, which a capture cannot
            torch.cuda.synchronize()
            self.graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on
            try:
                self.outputs = function(*self.inputs)
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, *inputs: torch.Tensor | None) -> list[torch.Tensor | None]:
        for static, given in zip(self.inputs, inputs):
            if static is not None:
                static.copy_(given)
        self.graph.replay()
        return list(self.outputs)


class GraphedFunction:
    """
    Calls a function, and captures it as a [`CudaGraph`] once it was called a few times with the same state.

    Args:
        calls_before (`int`, *optional*, defaults to 2): How many calls come before the capture, which takes several.
    """

    def __init__(self, calls_before: int = 2):
        self.calls_before, self.num_calls, self.state, self.graph = calls_before, 0, None, None

    def __call__(self, function: Callable, state: object, *inputs: torch.Tensor | None):
        """
        Args:
            function (`Callable`): See [`CudaGraph`].
            state (`object`): What it reads and writes besides. Another one means a new capture.
            inputs (`torch.Tensor` or `None`): What it takes.
        """
        if state is not self.state:
            self.state, self.num_calls, self.graph = state, 0, None
        self.num_calls += 1
        if self.graph is None and self.num_calls > self.calls_before and not CudaGraph.has_failed:
            try:
                self.graph = CudaGraph(function, inputs)
            except RuntimeError as error:
                CudaGraph.has_failed = True
                logger.warning(f"The draft could not be captured as a CUDA graph, and goes on without: {error}")
        return function(*inputs) if self.graph is None else self.graph(*inputs)
