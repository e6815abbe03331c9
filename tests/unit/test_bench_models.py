"""The models of the bench have the sizes that they claim."""

from __future__ import annotations

import pytest
import torch

from torchft._staging.units import MIB
from torchft.local_sgd_bench.cases import build

CPU = torch.device("cpu")


def test_rfc_has_the_sizes_of_the_rfc() -> None:
    model, _ = build("rfc", CPU, seed=0)
    sizes = sorted(parameter.nbytes for parameter in model.parameters())
    assert f"{sum(sizes) / MIB:.2f}" == "154.09"
    assert f"{sizes[-1] / MIB:.2f}" == "63.13"
    # two vocabulary matrices and about a hundred smaller tensors
    assert sizes[-2] == sizes[-1] > 20 * sizes[-3]
    assert len(sizes) == 102


def test_many_has_800_tensors() -> None:
    model, _ = build("many", CPU, seed=0)
    assert len(list(model.parameters())) == 800


@pytest.mark.parametrize("name", ["many", "bench_models:classifier"])
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        model, _ = build(name, CPU, seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_quadratic_loss_has_the_gradient_of_a_batch() -> None:
    model, step = build("many", CPU, seed=0)
    torch.manual_seed(5)
    step(0).backward()
    torch.manual_seed(5)
    targets = torch.randn(800)
    for target, parameter in zip(targets.tolist(), model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, parameter.detach() - target)
