"""Exceptions, one for each status of attn.h. Their text is the library's sentence: argument, value, what is accepted."""
import contextlib
import re


class Error(RuntimeError):
    """The base class of all errors of attn."""


class InvalidArgument(Error, ValueError):
    """An argument breaks a rule."""


class Unsupported(Error, NotImplementedError):
    """Valid, but no kernel of this backend serves it."""


class NoDevice(Error):
    """The driver is there, the device is not."""


class DriverMissing(Error):
    """The vendor's driver library is absent."""


class DriverError(Error):
    """The driver refused; the sentence has its native code."""


class OutOfMemory(Error, MemoryError):
    pass


class InternalError(Error):
    pass


_BY_STATUS = {1: InvalidArgument, 2: Unsupported, 3: NoDevice, 4: DriverMissing, 5: DriverError, 6: OutOfMemory}


def error_type(status):
    return _BY_STATUS.get(status, InternalError)


def with_names(error, names):
    """`error` with the caller's argument names: each whole word that is a key of `names` becomes its value."""
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if names[name] is not None)
    text = re.sub(rf"(?<![\w.])({words})(?!\w)", lambda found: names[found[1]], str(error))
    return type(error)(text)


@contextlib.contextmanager
def renamed(names):
    """Errors raised inside get the caller's argument names."""
    try:
        yield
    except (Error, TypeError) as error:
        raise with_names(error, names) from None
