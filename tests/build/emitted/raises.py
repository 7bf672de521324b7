"""A module that cannot be imported."""

import no_such_library  # noqa: F401
