"""Everything Saguaro raises on purpose.

    SaguaroError
    ├── ConfigError         a parameter that cannot be: names the value, the limit and the remedy
    ├── ModelError
    │   ├── ModelNotFound       no such folder, file or Hub id
    │   ├── UnsupportedModel    an architecture or feature this engine does not compute
    │   ├── CorruptModel        truncated, damaged or incomplete files
    │   ├── TokenizerMismatch   a tokenizer that does not fit the weights, or none at all
    │   └── DownloadError       a model that could not be fetched
    ├── CapacityError       the KV memory cannot hold what was asked for
    ├── DraftError          a draft that could not be started
    ├── CorpusError         texts to distil from that cannot be read or written
    ├── RequestError        one request that cannot be served; others go on
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   └── UnknownRequest
    └── ServiceError        a server that cannot serve a request through no fault of the request
        ├── Overloaded          too many others
        ├── Unavailable         it is ending, or has broken down
        ├── TimedOut            it took longer than a request may
        └── ReaderTooSlow       nobody takes what was generated

A message names what was given (`short`), what the limit is, and what to do about it.
"""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 4, 8, 8, 8
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 80, 80, 80
MAX_SHORT = 100  # characters


def short(value: object) -> str:
    """Enough of a value to know it again; a large one is not written out on the way.

    >>> short("banana"), short([1] * 10**6), short({"key": "x" * 10**6})[:20]
    ("'banana'", '[1, 1, 1, 1, 1, 1, 1, 1, ...]', "{'key': 'xxxxxxxxxxx")
    """
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHORT else f"{text[: MAX_SHORT - 3]}..."


class SaguaroError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SaguaroError, ValueError):
    """A parameter that cannot be."""


class ModelError(SaguaroError):
    """Something is wrong with a model on disk or on the Hub."""


class ModelNotFound(ModelError, FileNotFoundError):
    """No such folder, file or Hub id."""


class UnsupportedModel(ModelError):
    """An architecture or a feature this engine does not compute."""


class CorruptModel(ModelError):
    """Truncated, damaged or incomplete files."""


class TokenizerMismatch(ModelError):
    """A tokenizer that does not fit the weights, or none at all."""


class DownloadError(ModelError):
    """A model that could not be fetched."""


class CapacityError(SaguaroError):
    """The KV memory cannot hold what was asked for."""


class DraftError(SaguaroError):
    """A draft that could not be started."""


class CorpusError(SaguaroError):
    """Texts to distil from that cannot be read or written."""


class RequestError(SaguaroError, ValueError):
    """One request that cannot be served; others go on."""


class EmptyPrompt(RequestError):
    """A prompt of no tokens."""


class PromptTooLong(RequestError):
    """Prompt and wanted output do not fit the context."""


class UnknownRequest(RequestError, KeyError):
    """A request id that is not (or no longer) running."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class ServiceError(SaguaroError):
    """A server that cannot serve a request through no fault of the request."""


class Overloaded(ServiceError):
    """Too many other requests; later there will be fewer."""


class Unavailable(ServiceError):
    """The server is ending, or has broken down."""


class TimedOut(ServiceError):
    """It took longer than a request may."""


class ReaderTooSlow(ServiceError):
    """Nobody takes what was generated."""
