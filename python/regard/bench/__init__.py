"""Times Regard and the attention of PyTorch, JAX and NumPy: `python -m regard.bench --help`.

All run in one process on the same data, and each result is compared with float64 before it is
timed. The CPU needs NumPy only; a GPU needs PyTorch, for its stream and events.
"""
