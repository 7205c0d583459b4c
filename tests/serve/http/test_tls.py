"""`saguaro serve` with a certificate: a real connection by TLS."""

import re
import ssl
from pathlib import Path

import httpx
import pytest

from saguaro.errors import ConfigError
from saguaro.serve.address import check_certificate
from tests.serve.http.test_command import serving

TLS = Path(__file__).parent / "tls"  # for 127.0.0.1, signed by its own key, good for a hundred years
CERT, KEY = TLS / "cert.pem", TLS / "key.pem"


def test_https(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    args = (str(folder), "--kv-memory", "2MiB", "--ssl-certfile", str(CERT), "--ssl-keyfile", str(KEY))
    trust = ssl.create_default_context(cafile=str(CERT))
    with serving(log, *args) as (_, _):
        found = re.search(r" on (https://[\d.:]+)", log.read_text())
        assert found is not None, log.read_text()
        with httpx.Client(base_url=found[1], verify=trust, timeout=60) as client:
            asked = {"prompt": "the", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
                assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(found[1].replace("https", "http"), timeout=60)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(found[1], timeout=60)


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        (None, KEY, "there is no --ssl-certfile"),
        (CERT, None, "no certificate and private key that belong together"),
        (TLS / "none.pem", KEY, "No such file"),
        (KEY, CERT, "no certificate and private key that belong together"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused(cert: Path | None, key: Path | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_certificate(cert, key)
    check_certificate(CERT, KEY)
    check_certificate(None, None)
