"""Parameters made of other tensors: averaged where they hold one tensor and no more, refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from averaging_models import random_tensor
from local_manager import LocalManager, staged
from properties import make, synchronize_until_commit
from replica_threads import Replica, run_replicas
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from torchft.local_sgd import LocalSGD


class Opaque(torch.Tensor):
    """A tensor around others that computes with the first one, and does not say so."""

    names: tuple[str, ...] = ("first",)
    first: torch.Tensor
    dtype_shown: Any = None

    @staticmethod
    def __new__(cls, *tensors: torch.Tensor) -> Opaque:
        (first, *_) = tensors
        return torch.Tensor._make_wrapper_subclass(
            cls,
            first.shape,
            strides=first.stride(),
            dtype=cls.dtype_shown or first.dtype,
            device=first.device,
        )

    def __init__(self, *tensors: torch.Tensor) -> None:
        for name, tensor in zip(self.names, tensors, strict=False):
            setattr(self, name, tensor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Opaque, lambda wrapped: wrapped.first, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        out = tree_map_only(torch.Tensor, cls, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class Wrapped(Opaque):
    """Says what is inside, as float8 all-gather weights do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], *_: Any) -> Opaque:
        return Wrapped(*tensors.values())


class WithScale(Wrapped):
    names = ("first", "scale")


class Quantized(Wrapped):
    dtype_shown = torch.float32


class Nested(Wrapped):
    pass


def model_of(tensor: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_parameter("first", nn.Parameter(torch.zeros(1)))
    model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    return model


@pytest.mark.parametrize(
    "tensor",
    [
        TwoTensor(torch.ones(3), torch.zeros(3)),
        WithScale(torch.ones(3), torch.ones(())),
        Quantized(torch.ones(3, dtype=torch.int8)),
        Opaque(torch.ones(3)),
        Nested(TwoTensor(torch.ones(3), torch.zeros(3))),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["two tensors", "tensor and scale", "other dtype", "opaque", "nested", "jagged"],
)
def test_tensor_of_several_is_refused_at_construction(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="parameter 'odd'"):
        staged(model_of(tensor))


def test_tensor_of_several_is_refused_before_anything_is_sent() -> None:
    """A model may be converted after LocalSGD was made."""
    manager = LocalManager()
    model = model_of(torch.ones(3))
    local = staged(model, manager)
    model.odd = nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)), requires_grad=False)
    with pytest.raises(ValueError, match="parameter 'odd' is a TwoTensor"):
        local.sync()
    assert manager.quorums == 0


@pytest.mark.parametrize("options", [{}, {"offload_allreduce_to_cpu": True}], ids=["window", "host"])
def test_tensor_around_one_is_averaged(options: dict[str, Any]) -> None:
    def body(replica: Replica) -> torch.Tensor:
        model = model_of(Wrapped(random_tensor(replica.index, 5)))
        synchronize_until_commit(replica, make(LocalSGD, replica, model, True, **options))
        odd: Any = model.odd
        return odd.first if isinstance(odd, Wrapped) else odd.data.first

    expected = (random_tensor(0, 5) + random_tensor(1, 5)) / 2
    for average in run_replicas(2, body):
        assert torch.equal(average, expected)
