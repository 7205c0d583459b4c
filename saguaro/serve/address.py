"""The address and the certificate of a server, checked before a model is loaded."""

import socket
import ssl
from pathlib import Path

from saguaro.errors import ConfigError


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Refuse an unusable certificate, before the model is loaded."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError(f"--ssl-keyfile is {keyfile} and there is no --ssl-certfile; give both")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # refuses an encrypted key instead of asking
    except (OSError, ValueError) as e:
        files = " and ".join(str(file) for file in (certfile, keyfile) if file is not None)
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(
            f"{files}: no certificate and private key that belong together ({why}); give PEM files, the key without a "
            "password"
        ) from e


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded. It does not listen yet."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; it must be between 0 (any that is free) and 65535")
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
    except OSError as e:
        place.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another --host or --port") from e
    return place
