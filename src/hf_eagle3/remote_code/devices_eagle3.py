# SPDX-License-Identifier: Apache-2.0
"""What depends on the device: syncs, random generators, CUDA graphs, and cuDNN's attention."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .auto_eagle3 import logger


# A copy from pageable memory to these devices may return early: its source may be freed at once.
COPIES_WITHOUT_SYNC = {"cuda"}


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of Python numbers on a device. Unlike `torch.tensor(values, device="cuda")` this forces no sync."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.to(device, non_blocking=device.type in COPIES_WITHOUT_SYNC)


def reads_without_sync(device: torch.device) -> bool:
    """Whether Python can read a tensor on this device without a sync."""
    return device.type == "cpu"


def random_state(device: torch.device) -> torch.Tensor:
    """The state of a device's default random generator. Reading it forces no sync."""
    module, arguments = _random_module(device)
    return module.get_rng_state(*arguments)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of a device's default random generator."""
    module, arguments = _random_module(device)
    module.set_rng_state(state, *arguments)


def _random_module(device: torch.device) -> tuple[Any, tuple]:
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)


class CudnnSwitch:
    """Turns off cuDNN's attention during calls. The process has one switch: the last call to end restores it."""

    def __init__(self) -> None:
        self.lock, self.num_calls, self.was_on = threading.Lock(), 0, True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """
        Turns it off, whatever devices the models are on. cuDNN's attention, PyTorch's first choice on H100, makes a
        plan for each new length of the cache. That takes longer than a step, and fails for some masks
        (https://github.com/pytorch/pytorch/issues/190321).
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
    """Whether functions with fixed shapes are captured as CUDA graphs on this device."""
    return device.type == "cuda" and not CudaGraph.has_failed


class CudaGraph:
    """
    A function of tensors as a CUDA graph, which is launched at once instead of kernel by kernel. Inputs and outputs
    are tensors of fixed shapes, or `None`. The function must not sync, and whatever else it reads or writes must keep
    its address. It must have run on the `stream` before. The capture itself computes nothing. Raises `RuntimeError` if
    the function cannot be captured.
    """

    has_failed = False  # in this process
    lock = threading.Lock()  # one capture at a time: what another one begins with would break it

    def __init__(self, function: Callable, inputs: Sequence[torch.Tensor | None], stream: Any):
        with torch.inference_mode(False):  # calls in and outside of this mode write to them
            self.inputs = [None if each is None else torch.empty_like(each).copy_(each) for each in inputs]
        self.graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[stream.device.index]
        with on_stream(stream), CudaGraph.lock:
            torch.cuda.synchronize()
            # A graph must not use a workspace of cuBLAS that others may free. Without one it allocates its own.
            torch._C._cuda_clearCublasWorkspaces()
            # A capture blocks the generator's state, with which other threads may draw. So it gets another one. (What they
            # draw in the few microseconds until the state is back is drawn again.)
            state = generator.graphsafe_get_state()
            with torch.inference_mode(False):  # the states must serve other captures, too
                generator.graphsafe_set_state(generator.clone_state())
                try:
                    self.graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on
                finally:
                    generator.graphsafe_set_state(state)
            try:
                self.outputs = function(*self.inputs)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()

    def __call__(self, *inputs: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        for static, given in zip(self.inputs, inputs):
            if static is not None:
                assert given is not None  # as in the capture
                static.copy_(given)
        self.graph.replay()
        return self.outputs


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Runs kernels on a CUDA stream, after those of the current stream and before its next ones."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


class GraphedFunction:
    """Calls a function on a CUDA device, and captures it as a [`CudaGraph`] after a few calls."""

    CALLS_BEFORE = 2  # load kernels and allocate workspaces, which a capture cannot do

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.num_calls = 0
        self.shapes: list[Any] = []  # of the inputs
        self.graph: CudaGraph | None = None

    def __call__(self, function: Callable, *inputs: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Calls a function, always the same. Inputs of other shapes mean a new capture. The next call may overwrite the outputs."""
        shapes = [None if each is None else (each.shape, each.dtype) for each in inputs]
        if shapes != self.shapes:
            self.shapes, self.num_calls, self.graph = shapes, 0, None
        self.num_calls += 1
        if self.graph is None and self.num_calls > self.CALLS_BEFORE and not CudaGraph.has_failed:
            try:
                self.graph = CudaGraph(function, inputs, self.stream)
            except RuntimeError as error:
                CudaGraph.has_failed = True
                logger.warning(f"A CUDA graph could not be captured. Decoding continues without one: {error}")
        if self.graph is not None:
            return self.graph(*inputs)
        with on_stream(self.stream):
            return function(*inputs)
