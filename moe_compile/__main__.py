"""``python -m moe_compile``: the command line where the console script is not on PATH."""

from moe_compile.cli import main

if __name__ == "__main__":
    main()
