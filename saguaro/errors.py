"""The exceptions that Saguaro raises.

    SaguaroError
    ├── ConfigError         an invalid parameter: names the value, the limit and the remedy
    ├── ModelError
    │   ├── ModelNotFound       no such folder, file or Hub id
    │   ├── UnsupportedModel    an architecture or feature this engine does not compute
    │   ├── CorruptModel        truncated, damaged or incomplete files
    │   ├── TokenizerMismatch   a tokenizer that does not fit the weights, or a missing one
    │   └── DownloadError       a model that could not be downloaded
    ├── CapacityError       the KV memory is too small
    ├── DraftError          a draft that could not be started
    ├── RankError           a process of a divided target could not be started, or ended
    ├── ClusterError        a Ray cluster that cannot be reached, has no room, or cannot start replicas
    ├── CorpusError         texts to distil from that cannot be read or written
    ├── PeerError           another server that cannot be reached, or refuses or breaks off a request
    ├── DatasetError        prompts of a public set that could not be fetched, or are not what they should be
    ├── RequestError        one request cannot be served; others continue
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   └── UnknownRequest
    └── ServiceError        the server cannot serve a valid request
        ├── Overloaded          too many requests
        ├── Unavailable         the server is shutting down or has failed
        ├── TimedOut            the request's time limit is over
        └── ReaderTooSlow       the client does not read its output

A message names the given value (`short`), the limit and the remedy.
"""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 4, 8, 8, 8
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 80, 80, 80
MAX_SHORT = 100  # characters


def short(value: object) -> str:
    """An abbreviated repr. Large values are never formatted in full.

    >>> short("banana"), short([1] * 10**6), short({"key": "x" * 10**6})[:20]
    ("'banana'", '[1, 1, 1, 1, 1, 1, 1, 1, ...]', "{'key': 'xxxxxxxxxxx")
    """
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHORT else f"{text[: MAX_SHORT - 3]}..."


class SaguaroError(Exception):
    """Base of all exceptions of Saguaro."""


class ConfigError(SaguaroError, ValueError):
    """An invalid parameter."""


class ModelError(SaguaroError):
    """A problem with a model on disk or on the Hub."""


class ModelNotFound(ModelError, FileNotFoundError):
    """No such folder, file or Hub id."""


class UnsupportedModel(ModelError):
    """An architecture or a feature that this engine does not support."""


class CorruptModel(ModelError):
    """Truncated, damaged or incomplete files."""


class TokenizerMismatch(ModelError):
    """A tokenizer that does not fit the weights, or a missing one."""


class DownloadError(ModelError):
    """A model that could not be downloaded."""


class CapacityError(SaguaroError):
    """The KV memory is too small."""


class DraftError(SaguaroError):
    """A draft that could not be started."""


class RankError(SaguaroError):
    """A process of a divided target could not be started, or ended. The engine cannot continue."""


class ClusterError(SaguaroError):
    """A Ray cluster that cannot be reached, has no room, or cannot start replicas."""


class CorpusError(SaguaroError):
    """Texts for distillation that cannot be read or written."""


class PeerError(SaguaroError):
    """Another server that cannot be reached, or refuses or breaks off a request."""


class DatasetError(SaguaroError):
    """Prompts of a public set that could not be fetched, or are not what they should be."""


class RequestError(SaguaroError, ValueError):
    """One request cannot be served; others continue."""


class EmptyPrompt(RequestError):
    """A prompt without tokens."""


class PromptTooLong(RequestError):
    """Prompt and requested output do not fit the context."""


class UnknownRequest(RequestError, KeyError):
    """An unknown or finished request id."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


class ServiceError(SaguaroError):
    """The server cannot serve a valid request."""


class Overloaded(ServiceError):
    """Too many requests; retry later."""


class Unavailable(ServiceError):
    """The server is shutting down or has failed."""


class TimedOut(ServiceError):
    """The request's time limit is over."""


class ReaderTooSlow(ServiceError):
    """The client does not read its output."""
