"""
TorchTitan
==========

CPU staging for LocalSGD as a configuration flag of `TorchTitan <https://github.com/pytorch/torchtitan>`_::

    torchrun ... -m torchtitan.train --module torchft.titan --config llama3_torchft_debugmodel
        --fault_tolerance.semi_sync_method local_sgd --fault_tolerance.local_sgd_offload_to_cpu ...

Needs the extra ``titan``. :mod:`torchft.titan.config_registry` holds the configurations,
:mod:`torchft.titan.trainer` what your own configurations need. Nothing else in TorchFT imports this package.
"""
