"""The command line."""


def missing(error: ModuleNotFoundError, extra: str) -> str:
    """Says in one sentence which library is missing, and how the extra that has it is installed."""
    library = str(error.name).partition(".")[0]
    return (
        f"{library} is not installed: it comes with the extra {extra}, "
        f"pip install 'jax-specdec[{extra}]'"
    )
