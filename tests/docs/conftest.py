from tests.cli.conftest import ssdgen

__all__ = ["ssdgen"]
