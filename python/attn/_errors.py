"""Exceptions, one for each status of attn.h. Their text is the library's sentence: argument, value, what is accepted."""
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


# attn.h's names of forward()'s arguments, in sentences about wrong ones.
_FORWARD = {"seqlen": "max_seqlen_kv", "segments' seqlen": "segments' lengths", "seqlen_q": "max_seqlen_q", "seqlens": "seqlens_kv",
            "cu_seqlens": "cu_seqlens_kv", "list is at": "lists is at", "list_heads": "lists.shape[-2]", "list_size": "lists.shape[-1]",
            "bias_type": "bias", "out_type": "out_dtype"}


def forward_error(status, text):
    error = error_type(status)(text)
    return with_names(error, _FORWARD) if isinstance(error, InvalidArgument) else error


class renamed:
    """Errors raised inside get the caller's argument names. Appends of each token pass here, and a generator takes longer: 0.8 us, this 0.3."""
    __slots__ = ("names",)

    def __init__(self, names):
        self.names = names

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if isinstance(error, (Error, TypeError)):
            raise with_names(error, self.names) from None
