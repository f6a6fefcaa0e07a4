"""One measurement of one system in one process, and what makes the systems' environments."""
