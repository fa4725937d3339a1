"""Random problems, timed against PyTorch's attention: `python -m regard.bench map --help`."""
