"""Attention of model families beside torch's SDPA, by the choice of the adapters: ``python -m benchmarks families``.

``cases`` is the table of shapes, ``measure`` the times, ``report`` the tables. ``lengths`` finds from how many tokens
on adapters' calls pay: ``python -m benchmarks lengths``.
"""
