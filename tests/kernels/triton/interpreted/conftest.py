"""These tests run under Triton's interpreter, in a process of their own: see ../test_interpreted.py."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
