"""Times Regard beside the attention of PyTorch, JAX and NumPy: `python -m regard.bench --help`.

One run, the same data for all, each result checked against float64 before it is timed. Works on the
CPU with NumPy alone; on a GPU it needs PyTorch, whose stream and events it uses.
"""
