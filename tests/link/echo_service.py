"""A draft service with an Echo: python -m tests.link.echo_service PORT SWITCHES. It prints its address."""

import sys

from saguaro.link.address import Address, listen, name_of
from saguaro.link.service import Service
from tests.link.service import served

if __name__ == "__main__":
    place = listen(Address("127.0.0.1", int(sys.argv[1])), is_keyed=True)
    print(name_of(place.getsockname()), flush=True)
    Service(place, served(sys.argv[2])).run()
