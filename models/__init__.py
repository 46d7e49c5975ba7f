"""The shared backbone, the language model around it, its training module and generation."""
