"""Modules that ssdgen emitted from specs. Do not edit them: change the spec and run `ssdgen generate`."""
