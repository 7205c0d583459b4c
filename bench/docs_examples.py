"""Extension of Griffe: examples in docstrings become code blocks of the API reference."""

from typing import Any

import griffe

from bench.docs_site import fenced


class Examples(griffe.Extension):  # type: ignore[misc]
    """Puts the examples of every docstring in code blocks."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
