#!/usr/bin/env python3
"""Runs a program and adds a line to its output: the most memory that it held, in bytes.

Linux counts a parent's memory as its child's until the child's program begins, so a large process
must not start what it wants to measure; this small one does it instead.

    python examples/peak_memory.py PROGRAM ARGUMENT...
"""

import os
import sys

child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
