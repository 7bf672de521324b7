from tests.cli.conftest import cache, ssdgen

__all__ = ["cache", "ssdgen"]
