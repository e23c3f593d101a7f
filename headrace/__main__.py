"""`python -m headrace VERB`: the command `headrace`, for when it is not on PATH."""

from headrace.commands.app import main

if __name__ == "__main__":
    main()
