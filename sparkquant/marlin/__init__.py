"""The Marlin-path gate: which kernel ran, whether its output is right, how fast it is. vLLM is never imported here."""
