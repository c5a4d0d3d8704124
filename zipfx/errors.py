"""Errors: the one exception family of the library, and how other libraries' errors are quoted."""

from __future__ import annotations


class ZipError(Exception):
    """Anything that keeps models from being merged.

    The message says what is wrong, with the numbers or shapes at hand, and what to do about it.

    >>> raise ZipError("alpha is 1.5: choose a value from 0 to 1")
    Traceback (most recent call last):
    zipfx.errors.ZipError: alpha is 1.5: choose a value from 0 to 1
    """


class UnknownNameError(ZipError, KeyError):
    """There is nothing of the name that was looked up; code that catches `KeyError` catches it.

    >>> raise UnknownNameError("no space 'conv': did you mean 'conv1'?")
    Traceback (most recent call last):
    zipfx.errors.UnknownNameError: no space 'conv': did you mean 'conv1'?
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError's is the repr of its message


def first_line(error: BaseException) -> str:
    """The first line of another library's message, to be quoted in one of ours; the type of an
    error that says nothing.

    >>> first_line(ValueError("bad value\\nmore")), first_line(AssertionError())
    ('bad value', 'AssertionError')
    """
    return str(error).strip().split("\n")[0] or type(error).__name__
