"""The real worker with an Echo for a draft: the command that tests give to a link."""

import sys

from saguaro.config import DraftConfig
from saguaro.link import worker
from saguaro.link.answer import Side


def build(config: DraftConfig) -> Side:
    from tests.link.echo import Echo

    return Echo(config)


if __name__ == "__main__":
    worker.main(sys.argv[1:], build)
