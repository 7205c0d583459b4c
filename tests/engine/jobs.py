"""What a process of its own is told to do in tests."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from saguaro.errors import ConfigError


def maker(setting: Any) -> Callable[..., Any]:
    def do(what: str, value: Any = None) -> Any:
        if what == "loop":
            for _ in itertools.count():
                pass
        if what == "loop inside a library":
            return sum(itertools.repeat(1))
        if what == "sleep":
            time.sleep(3600)
        if what == "allocate":
            return len([bytearray(2**20) for _ in range(2**20)])
        if what == "abort":
            os.abort()
        if what == "refuse":
            raise ConfigError("no")
        if what == "break":
            raise KeyError("x")
        if what == "end":
            os._exit(3)
        return [setting, value, os.getpid()]

    return do
