"""The memory report as a library: S, M, host, link and peak of models as they stand or will stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
import torch.distributed as dist
from averaging_models import Parameters, odd_parameters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft._staging.buffers import StagingBuffers
from torchft._staging.plan import ShardLayout, StagingPlan
from torchft._staging.units import GIB, MIB
from torchft.local_sgd_memory import StagingMemory, staging_memory


def meta(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    return Parameters(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)


def test_figures_of_a_plain_model() -> None:
    report = staging_memory(meta((3, 5), (100, 7), (11,)), ranks_per_host=4, host_memory=GIB)
    S, M = (15 + 700 + 11) * 4, 700 * 4
    assert (report.parameters, report.tensors, report.rounds) == (726, 3, 3)
    assert (report.total_bytes, report.largest_bytes, report.largest_name) == (S, M, "p1")
    assert (report.device_bytes_original, report.device_bytes_staged) == (S, M)
    assert report.saved_bytes == S - M
    assert report.saved_share == pytest.approx(1 - M / S)
    assert report.host_bytes == S
    assert (report.link_bytes_committed, report.link_bytes_rejected) == (2 * S, S)
    assert report.bytes_by_tensor == (60, 2800, 44)
    assert report.by_dtype == {"float32": S}


def test_tied_weights_count_once() -> None:
    model = odd_parameters(0)
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert staging_memory(model).tensors == len(tied) - 1 == len(list(model.parameters()))


@pytest.mark.parametrize("device", ["cpu", sim.device()])
@pytest.mark.parametrize(
    ("window_mb", "allreduce_to_cpu"), [(None, False), (0, False), (0.0005, False), (1, False), (None, True)]
)
def test_report_is_what_the_buffers_take(
    window_mb: float | None, allreduce_to_cpu: bool, device: torch.device | str
) -> None:
    # Parameters of every layout and dtype; on the CPU the window is host memory as well.
    model = odd_parameters(0, device)
    report = staging_memory(model, offload_window_mb=window_mb, allreduce_to_cpu=allreduce_to_cpu)
    layouts = [ShardLayout.of(parameter) for parameter in model.parameters()]
    window_bytes = None if window_mb is None else int(window_mb * MIB)
    entry = sim.memory().alive
    buffers = StagingBuffers(StagingPlan.of(layouts, window_bytes, allreduce_to_cpu))
    window = sum(tensor.nbytes for tensor in buffers._windows.values())
    host = sum(tensor.nbytes for tensor in buffers.host)
    assert report.by_device[0].window_bytes == window
    assert report.rounds == len(buffers.plan.rounds)
    if device != "cpu":
        assert report.device_bytes_staged == sim.memory().alive - entry == window
        assert report.host_bytes == host
        # With a host all-reduce only what is strided has a place there, the larger one 4 x 4 x 6 floats.
        assert not allreduce_to_cpu or window == 4 * 4 * 4 * 6
    else:
        assert report.device_bytes_staged == 0
        assert report.host_bytes == host + window
        assert not allreduce_to_cpu or window == 0


def test_host_all_reduce() -> None:
    shapes = ((3, 5), (100, 7), (11,))
    report = staging_memory(meta(*shapes), allreduce_to_cpu=True, host_memory=GIB)
    S = (15 + 700 + 11) * 4
    assert (report.device_bytes_original, report.device_bytes_staged, report.saved_bytes) == (S, 0, S)
    assert (report.saved_share, report.host_bytes, report.rounds) == (1.0, S, 1)
    assert (report.link_bytes_committed, report.link_bytes_rejected) == (2 * S, S)
    assert report.link_bytes_of_gloo == 0
    lines = str(report).splitlines()
    assert "  with staging                 0 B  reduced on the host" in lines
    assert "  saved                   2.84 KiB  100.0 %" in lines
    assert lines[-1].startswith("  rejected")
    # With a window Gloo crosses the link itself, whether the vote is yes or no.
    assert staging_memory(meta(*shapes)).link_bytes_of_gloo == 2 * S


@pytest.mark.parametrize("allreduce_to_cpu", [False, True])
def test_planned_conversion_and_move_are_those_of_to(allreduce_to_cpu: bool) -> None:
    def figures(model: nn.Module, **planned: Any) -> dict[str, Any]:
        report = staging_memory(model, allreduce_to_cpu=allreduce_to_cpu, host_memory=0, **planned)
        return dataclasses.asdict(report)

    def to(*args: Any) -> nn.Module:
        return Parameters(parameter.detach().to(*args) for parameter in odd_parameters(0).parameters())

    model, device, dtype = odd_parameters(0), sim.device(), torch.bfloat16
    assert figures(model, dtype=dtype) == figures(to(dtype))
    assert figures(model, device=device) == figures(to(device))
    assert figures(model, device=torch.device("cpu")) == figures(model)
    # On the device, where it matters what is strided still.
    strided = odd_parameters(0, device)
    converted = Parameters(parameter.detach().to(dtype) for parameter in strided.parameters())
    assert figures(strided, dtype=dtype) == figures(converted)


def test_parameters_on_the_cpu_gain_nothing() -> None:
    report = staging_memory(Parameters([torch.zeros(10), torch.zeros(20)]))
    assert (report.device_bytes_original, report.saved_bytes, report.saved_share) == (0, 0, 0)
    assert report.link_bytes_committed == 0
    assert report.host_bytes == 120 + 80
    assert "staging saves nothing there and takes a window more." in str(report)


def test_host_all_reduce_on_the_cpu_takes_no_window() -> None:
    report = staging_memory(Parameters([torch.zeros(10), torch.zeros(20)]), allreduce_to_cpu=True)
    assert report.host_bytes == 120
    assert str(report).endswith("staging saves nothing there.")


def test_several_devices() -> None:
    with FakeTensorMode():
        model = Parameters(
            [
                torch.empty(100, device="meta"),
                torch.empty(50, device="cpu"),
                torch.empty(30, device="meta"),
                torch.empty(20, dtype=torch.bfloat16, device="cpu"),
            ]
        )
        report = staging_memory(model)
    on_meta, on_cpu = report.by_device
    assert (on_meta.device, on_meta.total_bytes, on_meta.window_bytes) == ("meta", 520, 400)
    assert (on_cpu.device, on_cpu.total_bytes, on_cpu.window_bytes) == ("cpu", 240, 200)
    assert (report.device_bytes_original, report.device_bytes_staged) == (520, 400)
    assert report.host_bytes == 520 + 240 + 200
    assert report.by_dtype == {"float32": 720, "bfloat16": 40}
    assert report.link_bytes_committed == 2 * 520


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8, 100])
def test_shards_are_those_of_torch_chunk(shards: int) -> None:
    shapes = [(7, 3), (8,), (1, 1000), (9, 2, 2), (64, 10), (0, 4)]
    chunks = [torch.empty(shape, device="meta").chunk(shards) for shape in shapes]
    by_rank = [
        sum(chunk[rank].numel() * 4 for chunk in chunks if rank < len(chunk)) for rank in range(shards)
    ]
    report = staging_memory(meta(*shapes), shards=shards)
    assert report.total_bytes == max(by_rank) == by_rank[0]
    assert report.bytes_by_tensor == tuple(chunk[0].numel() * 4 for chunk in chunks)
    assert report.parameters == 7 * 3 + 8 + 1000 + 36 + 640


@pytest.fixture
def rank_of_eight(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank_of_eight", [0, 3, 7], indirect=True)
def test_planned_shards_are_those_of_fsdp2(rank_of_eight: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 61), nn.LayerNorm(61), nn.Linear(61, 3))

    planned = staging_memory(build(), shards=8)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    actual = staging_memory(model)
    assert actual.parameters == planned.parameters
    if rank_of_eight == 0:
        assert dataclasses.replace(actual, host_memory=0) == dataclasses.replace(
            planned, shards=1, host_memory=0
        )
    else:
        assert actual.total_bytes < planned.total_bytes
        assert all(
            here <= there for here, there in zip(actual.bytes_by_tensor, planned.bytes_by_tensor, strict=True)
        )
    with pytest.raises(ValueError, match=r"shards=8 is for a model that is not sharded.*DTensor"):
        staging_memory(model, shards=8)


def test_dtype_converts_floating_point_parameters() -> None:
    report = staging_memory(meta((10, 10), (5,)), dtype=torch.bfloat16, shards=2)
    assert report.by_dtype == {"bfloat16": (50 + 3) * 2}


def test_nothing_is_allocated_or_changed() -> None:
    model = meta((1_000_000, 1_000_000))
    before = model.p0
    assert staging_memory(model, shards=3, dtype=torch.float64).largest_bytes == 333_334 * 10**6 * 8
    assert model.p0 is before
    assert before.dtype == torch.float32


@pytest.mark.parametrize(
    ("needed", "there", "fits", "missing", "says"),
    [
        (GIB, 4 * GIB, True, 0, "fits: 4.00 GiB given"),
        (GIB, 4 * GIB - 1, False, 1, "DOES NOT FIT, 1 B too little: 4.00 GiB given"),
        (GIB, 3 * GIB, False, GIB, "DOES NOT FIT, 1.00 GiB too little: 3.00 GiB given"),
    ],
)
def test_host_memory_of_all_ranks(needed: int, there: int, fits: bool, missing: int, says: str) -> None:
    report = staging_memory(meta((needed // 4,)), ranks_per_host=4, host_memory=there)
    assert (report.fits, report.host_bytes_missing) == (fits, missing)
    assert says in str(report)


def test_host_memory_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("torchft.local_sgd_memory.available_host_memory", lambda: 7 * GIB)
    report = staging_memory(meta((GIB // 4,)))
    assert (report.ranks_per_host, report.host_memory, report.fits) == (8, 7 * GIB, False)
    assert "8 ranks per host" in str(report)
    assert "7.00 GiB available on this host, within its limits" in str(report)

    monkeypatch.setattr("torchft.local_sgd_memory.available_host_memory", lambda: None)
    report = staging_memory(meta((GIB // 4,)))
    assert (report.fits, report.host_bytes_missing) == (None, 0)
    assert "not known how much there is" in str(report)


def weights(entry: int, step: int) -> tuple[StagingMemory, int, int]:
    # S is 10 GiB, M is 2 GiB.
    return staging_memory(meta(*[(GIB // 2,)] * 5)), entry * GIB, step * GIB


@pytest.mark.parametrize(
    ("entry", "step", "lowered", "says"),
    [
        (40, 80, 0, "is not the peak of this run, the step is: staging can't lower"),
        (40, 50, 0, "is not the peak of this run, the step is: staging can't lower"),
        (40, 45, 5, "is the peak of this run; with staging the step is"),
        (40, 42, 8, "takes all it saves off it"),
        (40, 40, 8, "takes all it saves off it"),
    ],
)
def test_is_the_synchronization_the_peak(entry: int, step: int, lowered: int, says: str) -> None:
    report, entry, step = weights(entry, step)
    peak = report.peak(entry, step)
    assert (peak.sync_peak_original, peak.sync_peak_staged) == (entry + 10 * GIB, entry + 2 * GIB)
    assert peak.run_peak_original == max(step, entry + 10 * GIB)
    assert peak.lowered_bytes == lowered * GIB
    assert says in str(peak)


@pytest.mark.parametrize(
    ("entry", "step", "match"),
    [
        (9, 80, r"entry_memory \(9.00 GiB\) is less than the parameters alone take \(10.00 GiB\)"),
        (40, 39, r"step_peak \(39.00 GiB\) is less than entry_memory \(40.00 GiB\)"),
    ],
)
def test_contradictory_peaks(entry: int, step: int, match: str) -> None:
    report, entry, step = weights(entry, step)
    with pytest.raises(ValueError, match=match):
        report.peak(entry, step)


def test_peak_needs_one_accelerator() -> None:
    with pytest.raises(ValueError, match="one accelerator, and the parameters are on cpu"):
        staging_memory(Parameters([torch.zeros(3)])).peak(GIB, GIB)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shards": 0}, "shards must be a whole number of at least 1, got 0"),
        ({"shards": True}, "shards must be"),
        ({"shards": 2.0}, "shards must be"),
        ({"ranks_per_host": 0}, "ranks_per_host must be"),
        ({"host_memory": -1}, "host_memory must be"),
        ({"offload_window_mb": -1}, "offload_window_mb must be"),
        ({"allreduce_to_cpu": 1}, "offload_allreduce_to_cpu must be True or False, got 1"),
        ({"allreduce_to_cpu": True, "offload_window_mb": 0}, "has no window, and offload_window_mb is 0"),
        ({"dtype": torch.float8_e4m3fn}, "has dtype torch.float8_e4m3fn, which has no average"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        staging_memory(meta((4,)), **arguments)


@pytest.mark.parametrize(
    ("model", "arguments", "match"),
    [
        (nn.ReLU(), {}, "ReLU has no parameters"),
        (SimpleNamespace(parameters=lambda: []), {}, r"SimpleNamespace has no named_parameters\(\): pass a"),
        (nn.LazyLinear(3), {}, "'weight' is not initialized"),
        (meta(()), {"shards": 2}, "'p0' is a scalar"),
        (
            nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)]),
            {},
            "'0' has dtype torch.int8, which has no average",
        ),
        (
            nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)]),
            {},
            "'0' has layout torch.sparse_coo",
        ),
    ],
)
def test_models_that_cannot_be_averaged(model: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        staging_memory(model, **arguments)


def test_table() -> None:
    text = str(
        staging_memory(
            meta((1024, 1024), (1024,)), shards=4, ranks_per_host=2, host_memory=GIB, offload_window_mb=0
        )
    )
    assert text.splitlines() == [
        "1,049,600 parameters in 2 tensors, on the fullest of 4 ranks",
        "  S, all of a rank        1.00 MiB  float32",
        "  M, the largest          1.00 MiB  p0",
        "Memory on the device, added by a synchronization",
        "  without staging         1.00 MiB",
        "  with staging            1.00 MiB  in 2 rounds",
        "  saved                   1.00 KiB  0.1 %",
        "Host memory, from the first all-reduce to the end of write-back",
        "  per rank                1.00 MiB",
        "  2 ranks per host        2.00 MiB  fits: 1.00 GiB given",
        "Host link, per rank and synchronization",
        "  committed               2.00 MiB",
        "  rejected                1.00 MiB",
        "  more with Gloo          2.00 MiB  it reduces on the host; a host all-reduce avoids that",
    ]
