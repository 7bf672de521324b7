"""Running emitted modules: the token loop, the emulator, and verification against it."""
