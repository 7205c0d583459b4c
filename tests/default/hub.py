"""A small Hugging Face Hub on loopback: real HTTP, files of a folder under one repository name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from tests.loopback import Quiet, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(repo: str, folder: Path) -> Iterator[str]:
    """Serve the folder's files as a repository; the Hub's address."""

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(self.path.split("?")[0])
            if path.startswith(f"/api/models/{repo}/tree/"):
                files = [
                    {"type": "file", "path": p, "size": (folder / p).stat().st_size, "oid": COMMIT} for p in _files()
                ]
                self._send(200, json.dumps(files).encode(), with_body)
            elif path.startswith(f"/api/models/{repo}"):
                listing = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": p} for p in _files()]}
                self._send(200, json.dumps(listing).encode(), with_body)
            elif path.startswith(f"/{repo}/resolve/") and (file := _file(path)).is_file():
                self._send(200, file.read_bytes(), with_body, etag=f'"{file.name}-{file.stat().st_size}"')
            else:
                self._send(404, b"{}", with_body, error="RepoNotFound")

        def _send(self, status: int, body: bytes, with_body: bool, etag: str = '"x"', error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    def _files() -> list[str]:
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def _file(path: str) -> Path:
        """/someone/tiny/resolve/main/original/params.json -> the file original/params.json"""
        return folder / path.removeprefix(f"/{repo}/resolve/").split("/", 1)[1]

    with listening(Handler) as address:
        yield address
