"""
LocalSGD bench
==============

Compares the synchronization of the TorchFT release with CPU staging, on this machine: a lighthouse, replica
groups as processes, and all cases interleaved in one run, so that whatever else the machine does hits all of
them alike::

    python -m torchft.local_sgd_bench --window-mb 0 --allreduce-to-cpu
"""
