"""Imported last by a process that has imported all it needs, before it forks or runs many tests.

Modules live until the end. The garbage collector would visit them in each full collection, and a forked process would
copy the memory that it touches there.
"""

import gc

gc.collect()
gc.freeze()
gc.enable()
