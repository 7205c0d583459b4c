"""`python -m saguaro.cli.tethered COMMAND ...`: the command line, ended by SIGTERM when its standard input closes.

A server that another command has started ends with that command, however that one ends.
"""

import os
import signal
import threading

from saguaro.cli.main import main


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    main()
