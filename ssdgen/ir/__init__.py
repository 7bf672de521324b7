"""The types between the stages: plain frozen dataclasses that use no library."""
