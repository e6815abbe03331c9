"""
Fault-tolerant LocalSGD training of a small language model, start to end.

``python -m torchft.examples.local_sgd`` trains on this machine; :mod:`.train` is the loop to copy.
"""
