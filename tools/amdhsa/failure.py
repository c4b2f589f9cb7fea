class Failure(Exception):
    """An error as one sentence: what was given, and what is accepted."""
