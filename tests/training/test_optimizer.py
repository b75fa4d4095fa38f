import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_eagle3.training.optimizer import Float32Muon, muon_with_adamw, orthogonalized, split_parameters


COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def naive(matrix, steps):
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_orthogonalized(shape, steps):
    torch.manual_seed(0)
    matrix = torch.randn(shape) @ torch.diag(torch.rand(shape[1]) ** 4)  # of very different singular values
    expected = naive(matrix, steps) if shape[0] <= shape[1] else naive(matrix.T, steps).T
    torch.testing.assert_close(orthogonalized(matrix, COEFFICIENTS, steps, 1e-7).double(), expected, atol=1e-3, rtol=0)


def test_float32_muon_is_torch_s_but_for_rounding():
    torch.manual_seed(0)
    weights = [torch.randn(12, 30), torch.randn(20, 10)]
    ours, theirs = ([weight.clone().requires_grad_() for weight in weights] for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = Float32Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(4):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for start, mine, other in zip(weights, ours, theirs):
        moved = (other - start).norm()
        assert (mine - other).norm() < 0.02 * moved
    # Checkpoints of one are those of the other.
    optimizers[1].load_state_dict(optimizers[0].state_dict())


def test_which_parameters_muon_trains():
    draft = torch.nn.ModuleDict(
        {"norm": torch.nn.LayerNorm(4), "fc": torch.nn.Linear(4, 4), "lm_head": torch.nn.Linear(4, 9)}
    )
    draft.requires_grad_(True)["norm"].bias.requires_grad_(False)
    fc, head = draft["fc"].weight, draft["lm_head"].weight
    matrices, others = split_parameters(draft.named_parameters(), exclude=("lm_head",))
    assert [*map(id, matrices)] == [id(fc)] and len(others) == 5
    assert [*map(id, split_parameters(draft.named_parameters())[0])] == [id(fc), id(head)]
    args = SimpleNamespace(weight_decay=0.1, learning_rate=1.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    groups = muon_with_adamw(draft, ["fc.weight", "lm_head.weight"], args).param_groups
    found = [([id(weight) for weight in group["params"]], group["weight_decay"], group["lr"]) for group in groups]
    rest = [id(each) for each in (draft["norm"].weight, draft["fc"].bias, draft["lm_head"].bias)]
    assert found == [([id(fc)], 0.1, 1.0), (rest, 0.0, 0.2), ([id(head)], 0.1, 0.2)]


def test_torch_without_muon_is_refused(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.delitem(sys.modules, "hf_eagle3.training.optimizer")
    with pytest.raises(ImportError, match="torch 2.9.*pip install"):
        importlib.import_module("hf_eagle3.training.optimizer")
