"""TorchTitan's fault-tolerant trainer, which hands the flag on to LocalSGD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.experiments.torchft.config import FaultTolerance as TitanFaultTolerance
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer as TitanTrainer

from torchft import local_sgd
from torchft.titan.config import FaultTolerance, allreduces_on_host, check_fault_tolerance


class FaultTolerantTrainer(TitanTrainer):
    """TorchTitan's fault-tolerant trainer; with the flag off exactly that one.

    Args:
        config: the job, command line included.

    Raises:
        ValueError: the flag without LocalSGD or with pipeline stages, or a window or an all-reduce on the
            host that can't be used. No process group exists yet.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        """TorchTitan's job configuration, whose ``fault_tolerance`` section knows the flag."""

        # Narrowed, as TorchTitan narrows fields of its own configurations.
        fault_tolerance: FaultTolerance = field(  # pyright: ignore[reportIncompatibleVariableOverride]
            default_factory=FaultTolerance
        )

    config: Config

    # torchrun shows the message of an error only where it was recorded.
    @record
    def __init__(self, config: Config) -> None:
        # Not when the section is made: a configuration may set the flag and leave the rest to the command
        # line.
        check_fault_tolerance(config.fault_tolerance, config.parallelism.pipeline_parallel_degree)
        super().__init__(config)

    @record
    def train(self) -> None:
        """Trains, under LocalSGD with CPU staging where the flag is on."""
        section = self.config.fault_tolerance
        if not section.local_sgd_offload_to_cpu:
            super().train()
            return
        staged = local_sgd.LocalSGD(
            manager=self.ft_manager.manager,
            model=self.model_parts[0],
            optimizer=self.optimizers,
            sync_every=section.sync_steps,
            offload_averaged_parameters_to_cpu=True,
            offload_window_mb=section.local_sgd_offload_window_mb,
            offload_allreduce_to_cpu=allreduces_on_host(section),
        )
        with staged, self._semi_sync_method_hidden():
            super().train()

    @contextmanager
    def _semi_sync_method_hidden(self) -> Iterator[None]:
        # TorchTitan's train() would enter a LocalSGD of its own, and every step would be averaged twice. The
        # Manager's quorum mode, which depends on the method too, was settled in __init__.
        section = self.config.fault_tolerance
        self.config.fault_tolerance = replace(section, semi_sync_method=None)
        try:
            yield
        finally:
            self.config.fault_tolerance = section


def with_local_sgd_offload(config: TitanTrainer.Config) -> FaultTolerantTrainer.Config:
    """Turns a configuration of TorchTitan's fault-tolerant trainer into one that knows the flag.

    Args:
        config: the configuration as a function of your ``config_registry`` builds it; not modified.

    Returns:
        A configuration with the same values, for :class:`FaultTolerantTrainer`; ``config`` itself if it
        knows the flag already.

    Raises:
        TypeError: ``config`` belongs to another trainer, whose additional fields or methods would be lost.
    """
    if isinstance(config, FaultTolerantTrainer.Config):
        return config
    if type(config) is not TitanTrainer.Config:
        raise TypeError(
            f"expected a {TitanTrainer.Config.__module__}.{TitanTrainer.Config.__qualname__}, got a "
            f"{type(config).__module__}.{type(config).__qualname__}: derive a trainer of your own from "
            "torchft.titan.trainer.FaultTolerantTrainer, and its Config from that one's Config"
        )
    if type(config.fault_tolerance) is not TitanFaultTolerance:
        section = type(config.fault_tolerance)
        raise TypeError(
            f"the fault_tolerance section is a {section.__module__}.{section.__qualname__}, whose additional "
            "fields would be lost: derive it from torchft.titan.config.FaultTolerance"
        )
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    values["fault_tolerance"] = FaultTolerance(
        **{each.name: getattr(config.fault_tolerance, each.name) for each in fields(config.fault_tolerance)}
    )
    return FaultTolerantTrainer.Config(**values)
