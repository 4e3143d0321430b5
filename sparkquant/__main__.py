"""`python -m sparkquant`: the same as the `sparkquant` command, where no script is installed."""

from sparkquant.cli import main

if __name__ == "__main__":
    main()
