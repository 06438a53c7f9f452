"""Whole forwards of two models with random weights, by each attention: ``python -m benchmarks model``.

``problems`` has the sizes, ``video`` and ``llama`` the layers, ``dense`` and ``cached`` the ways to attend, ``measure``
the times, ``report`` tables and figure.
"""
