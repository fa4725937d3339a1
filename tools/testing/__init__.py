"""The parts of tools/test.py: stages, the two lanes that they run in, and what is said of them."""
