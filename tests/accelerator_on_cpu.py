"""
Tensors that say they are on an accelerator, while a CPU computes. Operators refuse those of the host beside them, as
an accelerator's do. It counts how often the host would wait: for each tensor that it reads, and for each that it copies
to the device, unless that is said to be non-blocking. As a program, it compares texts on that device with plain
generation on the CPU, and prints a line of JSON for each case: whether the prompt was left on the host, whether the
texts are equal, the forwards and the waits.
"""

import copy
import json
import sys
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers.generation import utils as generation


torch.inference_mode = lambda mode=True: torch.no_grad()  # subclasses cannot be viewed in it

from conftest import RECURRENT, make_batch, make_block_draft, make_draft, make_prompt, make_target  # noqa: E402

from hf_eagle3.remote_code import devices_eagle3  # noqa: E402
from hf_eagle3.remote_code.target_eagle3 import mixes_tokens  # noqa: E402


aten = torch.ops.aten
TAKE_HOST_TENSORS = (aten.copy_, aten._to_copy, aten.index, aten.index_put_, aten._index_put_impl_)
TAKE_INDICES = TAKE_HOST_TENSORS[2:]
LOOKS = (aten._local_scalar_dense, aten.equal, aten.nonzero)
num_waits = 0


class Generator(torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls)  # the accelerator's is the CPU's


torch.Generator = Generator


class OnAccelerator(torch.Tensor):
    @staticmethod
    def __new__(cls, on_host):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device="pretended:0",
        )
        tensor.on_host = on_host
        return tensor

    def tolist(self):
        global num_waits
        num_waits += 1
        return self.on_host.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """Makes tensors on the accelerator where they are asked for."""

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


def compute(operator, args, kwargs):
    global num_waits
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_accelerator = [tensor for tensor in tensors if isinstance(tensor, OnAccelerator)]
    on_host = [tensor for tensor in tensors if not isinstance(tensor, OnAccelerator)]
    packet, device = operator.overloadpacket, kwargs.get("device")
    goes_to = torch.device(device).type == "pretended" if device is not None else bool(on_accelerator)
    if packet in (aten.index, aten.copy_):
        goes_to = isinstance(args[0], OnAccelerator)
    if on_accelerator and any(tensor.dim() > 0 for tensor in on_host) and packet not in TAKE_HOST_TENSORS:
        raise RuntimeError(f"{operator} of tensors on the accelerator and on the host")
    if packet is aten.index and on_accelerator and not goes_to:
        raise RuntimeError("a tensor on the host is indexed by one on the accelerator")
    is_copy = packet in (aten._to_copy, aten.copy_)
    num_waits += bool(on_accelerator) and (packet in LOOKS or (is_copy and not goes_to))
    is_blocking = not kwargs.get("non_blocking", args[2] if packet is aten.copy_ and len(args) > 2 else False)
    num_waits += is_copy and goes_to and is_blocking and any(tensor.numel() > 0 for tensor in on_host)
    # An index of the host is copied first.
    num_waits += packet in TAKE_INDICES and bool(on_accelerator) and any(tensor.dim() > 0 for tensor in on_host)
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    args, kwargs = tree_map(lambda leaf: leaf.on_host if isinstance(leaf, OnAccelerator) else leaf, (args, kwargs))
    result = operator(*args, **kwargs)
    if operator._schema.is_mutable and isinstance(result, torch.Tensor):
        return next(tensor for tensor in tensors if getattr(tensor, "on_host", tensor) is result)
    return tree_map(lambda leaf: OnAccelerator(leaf) if goes_to and isinstance(leaf, torch.Tensor) else leaf, result)


def move(model):
    model, moved = copy.deepcopy(model), {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in moved:
                    on_accelerator = OnAccelerator(tensor.detach())
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(on_accelerator, False) if is_parameter else on_accelerator
                tensors[name] = tensor if tensor is None else moved[id(tensor)]
    return model


def main(families):
    global num_waits
    for family in families:
        family, _, method = family.partition(":")  # of a block draft
        target, prompt = make_target(family, attn_implementation="eager"), make_prompt(9)
        draft = make_block_draft(method, target) if method else make_draft(target, [prompt], num_tokens=8)
        draft._borrowed_embedding.clear()
        accelerated_target, accelerated_draft = move(target), move(draft)
        with Accelerator(), torch.no_grad():
            mixes_tokens(accelerated_target)  # tries each layer once, since its weights are of another class
        for lengths, policy, settings in (
            ([9], "static", {}),
            ([9, 4], "static", {"do_sample": True, "return_dict_in_generate": True}),
            ([9], "auto", {"repetition_penalty": 1.3}),
            ([4, 9], "auto", {"cache_implementation": "static"}),
            ([4, 9], "static", {"max_new_tokens": 7}),
        ):
            if "cache_implementation" in settings and family in RECURRENT:  # which is refused
                continue
            is_on_host = settings == {"max_new_tokens": 7}
            # In an older one plain calls fail, too.
            if is_on_host and not hasattr(generation, "move_to_device"):
                continue
            accelerated_draft.generation_config.tree_policy = policy
            batch, settings = make_batch(lengths), {"max_new_tokens": 8, "do_sample": False, **settings}
            torch.manual_seed(0)
            expected = target.generate(**batch, **settings)
            with Accelerator(), torch.no_grad():
                if not is_on_host:
                    batch = {name: OnAccelerator(tensor) for name, tensor in batch.items()}
                torch.manual_seed(0)
                num_waits = 0
                actual = accelerated_target.generate(**batch, assistant_model=accelerated_draft, **settings)
            if "return_dict_in_generate" in settings:
                actual, expected = actual.sequences, expected.sequences
            forwards = accelerated_draft.last_generation.target_forwards
            is_equal = isinstance(actual, OnAccelerator) != is_on_host
            is_equal &= getattr(actual, "on_host", actual).equal(expected)
            case = [family, lengths, policy, settings, is_on_host, is_equal, forwards, num_waits]
            print(json.dumps(case), flush=True)


devices_eagle3.COPIES_WITHOUT_SYNC.add("pretended")


if __name__ == "__main__":
    backend = types.ModuleType("torch.pretended")
    backend.is_available = backend.is_initialized = lambda: True
    backend.device_count, backend.current_device = lambda: 1, lambda: 0
    backend._is_in_bad_fork = lambda: False
    backend._lazy_init = backend.manual_seed_all = lambda *args: None
    backend.is_autocast_enabled, backend.get_autocast_dtype = lambda: False, lambda: torch.bfloat16
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]
    backend.get_rng_state = lambda device=None: torch.get_rng_state()
    backend.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    _setup_privateuseone_for_python_backend("pretended", backend)
    main(sys.argv[1:])
